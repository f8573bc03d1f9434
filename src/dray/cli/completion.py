"""`dray completion`: complete verbs, options, runs, recipes, keys and sites in your shell.

The shell runs dray at each TAB, with the line in the environment. Typer answers, once there is a verb on the line.
"""

from __future__ import annotations

import os
from typing import Literal

from dray import cli
from dray.contract import exit_codes

# Unlike Typer's own scripts: no word goes through eval or a pattern, since others may name folders; a = in a word
# stays in it; and no blank follows a word that ends in = or /.
_BASH = """\
_dray_completion() {
    local line=${COMP_LINE:0:COMP_POINT} argv
    read -ra argv <<<"$line"
    [[ $line == *[[:space:]] ]] && argv+=("")
    mapfile -t COMPREPLY < <(_DRAY_COMPLETE=complete_bash _TYPER_COMPLETE_ARGS=$line COMP_WORDS=$line \\
        COMP_CWORD=$((${#argv[@]} - 1)) "$1" 2>/dev/null)
    [[ -n ${COMPREPLY[0]-} ]] || COMPREPLY=()
    [[ ${COMPREPLY[0]-} == *[=/] ]] && compopt -o nospace
    local word=${line##*[[:space:]]}
    # Bash takes a = for the end of a word, so what stands before it is not part of the answer.
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
}
complete -o default -F _dray_completion dray
"""
_ZSH = """\
#compdef dray
_dray_completion() {
    local -a lines whole open
    local line value
    lines=("${(@f)$(_DRAY_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \\
        _TYPER_COMPLETE_ARGS=${(j: :)words[1,CURRENT]} $words[1] 2>/dev/null)}")
    for line in $lines; do
        value=${line%%$'\\t'*}
        if [[ $value == *[=/] ]]; then
            open+=("$value")
        elif [[ $line == *$'\\t'* ]]; then
            whole+=("${value//:/\\\\:}:${line#*$'\\t'}")
        else
            whole+=("${value//:/\\\\:}")
        fi
    done
    if (( ! $#whole && ! $#open )); then
        [[ $PREFIX == -*=* ]] && compset -P 1 '*='
        _files
        return
    fi
    [[ $PREFIX == -*=* ]] && compset -P 1 '*='
    compadd -S '' -a open
    _describe dray whole
}
if [[ $funcstack[1] == _dray ]]; then _dray_completion "$@"; else compdef _dray_completion dray; fi
"""
_FISH = """\
function __dray_completion
    set -l found (env _DRAY_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \\
        _TYPER_COMPLETE_ARGS=(commandline -cp | string collect) dray 2>/dev/null)
    if test -n "$found[1]"
        string replace -r -- '^(?=[^-])' (string match -r -- '^--?[^=]+=' (commandline -ct); or echo '') $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command dray --no-files --arguments '(__dray_completion)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Literal["bash", "zsh", "fish"],
) -> None:
    """Print a script with which your shell completes verbs, options, runs, recipes, their keys, and sites.

    SHELL: Your shell; echo $SHELL ends in its name.

    dray completion bash >>~/.bashrc
    dray completion zsh >>~/.zshrc
    dray completion fish >~/.config/fish/completions/dray.fish
    """
    print(_SCRIPTS[shell], end="")


def answer() -> int:
    """Print what may follow the words on the line, in the format of the shell that asks."""
    line, _, begun = os.environ.get("_TYPER_COMPLETE_ARGS", "").rpartition(" ")
    typed = line.split()[1:]
    if not typed:
        for verb, about in (cli.SHOWN | cli.HIDDEN).items():
            if about and verb.startswith(begun):
                print(verb if os.environ["_DRAY_COMPLETE"] == "complete_bash" else f"{verb}\t{about}")
    elif typed[0] in cli.SHOWN | cli.HIDDEN and "--" not in typed:
        from typer.completion import get_completion_inspect_parameters

        from dray.cli.app import command

        get_completion_inspect_parameters()  # registers the shells with typer, as its own options for completion do
        command(typed[0])(prog_name="dray", complete_var="_DRAY_COMPLETE", standalone_mode=False)
    return exit_codes.DONE
