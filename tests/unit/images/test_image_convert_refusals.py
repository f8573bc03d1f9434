"""Every line that `dray image convert` cannot carry is refused by its number, its words, the reason and a fix."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from dray.contract.findings import ConfigError
from dray.images import convert


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("print(1)\n")
    (tmp_path / "req.txt").write_text("trl\n")
    return tmp_path


def converted(folder: Path, text: str, name: str = "Dockerfile") -> convert.Converted:
    (folder / name).write_text(text)
    return convert.convert(folder / name)


BAD = [
    ("RUN --mount=type=cache,target=/c pip install a", "the option --mount"),
    ("RUN --network=none a", "the option --network"),
    ("COPY --chown=1:1 req.txt /", "the option --chown"),
    ("COPY --from=b /a /b", "the option --from"),
    ("FROM --platform=linux/arm64 b", "the option --platform"),
    ("RUN <<EOF", "a here-document"),
    ("COPY <<-'EOF' /a", "a here-document"),
    ('SHELL ["bash", "-c"]', "%post has one shell"),
    ("ARG NONE", "no value of its own"),
    ("FROM b AS second", "a second stage"),
    ("ONBUILD RUN a", "a definition has nothing for the images that are built from it"),
    ("HEALTHCHECK CMD true", "Apptainer checks no health"),
    ("STOPSIGNAL SIGINT", "Apptainer has none"),
    ("EXPOSE 80", "a container of Apptainer has the host's ports"),
    ("USER me", "a container of Apptainer runs as its caller"),
    ("VOLUME /data", "Apptainer has none"),
    ("CMD ['a']", "a list with single quotes, which Docker takes for a command"),
    ('ENTRYPOINT ["a", 1]', "a list that is not one of texts"),
    ("ADD https://example.org/x /x", "ADD fetches it"),
    ("ADD all.tar.gz /x", "ADD unpacks it, %files do not"),
    ("COPY *.txt /x/", "a pattern, which the two read differently"),
    ("COPY none.txt /x", "none.txt is not in "),
    ("COPY ../x /x", "../x is not in "),
    ("COPY linked /x", "linked/a is a link"),
    ('COPY ["a b", "/x"]', "a space, a quote, a % or a backslash in a path"),
    ("ENV A=$HOME", "$HOME is the base's, and would be the host's in Apptainer"),
    ("ENV A=1 B=$A", "$A is set in the same line"),
    ("ENV A=${B:-c}", "a reference other than $NAME or ${NAME}"),
    ("ENV A=$(id)", "what a shell would run or replace"),
    ('ENV A="a\\"b"', "a backslash"),
    ("ENV A", "A is no NAME=VALUE"),
    ("RUN echo {{ a }}", "two braces, which a definition replaces"),
    ('RUN ["sh", "-c", "a\\n%post"]', "a line that begins as a section of a definition"),
    ("WORKDIR $HOME/x", "$HOME has no value that this file sets"),
    ("LABEL a=", "a label without a name of letters, or without a text"),
    ("INSTALL a", "no instruction that dray knows"),
    ("RUN", "nothing after it"),
    ("ENV A='it", "No closing quotation"),
]


@pytest.mark.parametrize(("line", "why"), BAD)
def test_a_line_that_a_definition_cannot_say(folder: Path, line: str, why: str) -> None:
    (folder / "linked").mkdir()
    (folder / "linked" / "a").symlink_to("b")
    with tarfile.open(folder / "all.tar.gz", "w:gz") as made:
        made.add(folder / "req.txt", "req.txt")
    with pytest.raises(ConfigError, match="1 line cannot be carried into a definition") as refused:
        converted(folder, f"FROM a\n\n{line}\n")
    assert refused.value.details["where"] == str(folder / "Dockerfile")
    assert refused.value.details["found"].startswith(f"line 3: {line}: {why}"), refused.value
    assert refused.value.details["fix"].startswith("line 3: ")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("ENV HF_TOKEN=abc123", "ENV HF_TOKEN=[secret]"),
        ("ARG API_KEY='abc 123'", "ARG API_KEY=[secret]"),
        ("ENV A=hf_abcdefghijklmnopqrstuvwxyz0123456789", "ENV A=[secret]"),
        ("RUN login hf_abcdefghijklmnopqrstuvwxyz0123456789", "RUN login [secret]"),
        ("USER --password abc123", "USER --password [secret]"),
    ],
)
def test_a_secret_is_refused_and_not_shown(folder: Path, line: str, shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        converted(folder, f"FROM a\n{line}\n")
    assert refused.value.details["found"].startswith(f"line 2: {shown}")
    assert "abc" not in str(refused.value)


def test_all_lines_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        converted(folder, "FROM a\nUSER me\nRUN a\nEXPOSE 80\nARG X\n")
    assert str(refused.value) == (
        f"3 lines cannot be carried into a definition\n  where:  {folder}/Dockerfile\n"
        "  found:  line 2: USER me: a container of Apptainer runs as its caller\n"
        "          line 4: EXPOSE 80: a container of Apptainer has the host's ports\n"
        "          line 5: ARG X: no value of its own\n"
        "  fix:    line 2: delete the line\n          line 4: delete the line\n          line 5: ARG X=VALUE"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# escape=`\nFROM a\n", "line 1: # escape=`: another escape character"),
        ("FROM scratch\nCOPY req.txt /\n", "line 1: FROM scratch: an empty base"),
        ("RUN a\n", "line 1: RUN a: before FROM"),
        (
            "FROM a\nRUN mkdir /srv/x\nCOPY req.txt /srv/x/\n",
            "line 3: COPY req.txt /srv/x/: the RUN of line 2 names /srv/x",
        ),
        ("\n\n", "line 1: : no FROM with an image"),
        ("FROM a;b\n", "line 1: FROM a;b: no name of an image"),
        ("FROM $TAG\n", "line 1: FROM $TAG: $TAG has no value that this file sets"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole(folder: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        converted(folder, text)
    assert refused.value.details["found"].startswith(why)


def test_a_file_that_decides_what_is_copied(folder: Path) -> None:
    (folder / ".dockerignore").write_text("app\n")
    with pytest.raises(ConfigError, match="1 line") as refused:
        converted(folder, "FROM a\nCOPY . /x\n")
    assert "a .dockerignore decides what Docker copies" in refused.value.details["found"]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("%setup\n    cp a b", "%setup: it runs on the machine that builds"),
        ("%pre\n    a", "%pre: it runs on the machine that builds"),
        ("%appinstall x\n    a", "%appinstall x: Docker has no apps in an image"),
        ("%arguments\n    A=1", "%arguments: Docker has other variables"),
        ("%post\n    echo {{ A }}", "echo {{ A }}: a value that the build is given"),
        ("%test\n    true", "%test: Docker runs no test when it builds"),
        ("%help\n    text", "%help: Docker has nothing for it"),
        ("%startscript\n    a", "%startscript: Docker has no instances"),
        ("%files from build\n    a", "%files from build: files of another stage"),
        ("%post -c /bin/bash\n    a", "%post -c /bin/bash: options of the section"),
        ("%post\n    a\n%post\n    b", "%post: a section that comes twice"),
        ("Bootstrap: docker\nFrom: b", "Bootstrap: docker: a second stage"),
        ("%files\n    /etc/hosts /x", "/etc/hosts /x: Docker copies nothing from outside its context"),
        ("%files\n    *.txt /x", "*.txt /x: a pattern"),
        ("%files\n    none /x", "none /x: none is not in "),
        ("%files\n    $A /x", "$A /x: not a source and a place"),
        ("%environment\n    A=1", "A=1: no export NAME=VALUE"),
        ("%environment\n    if x; then export A=1; fi", "if x; then export A=1; fi: no export NAME=VALUE"),
        ("%environment\n    export A=$HOME", "export A=$HOME: $HOME is the host's, or the base's"),
        ("%environment\n    export A=`id`", "export A=`id`: what a shell would run or replace"),
        ("%post\n    echo A=1 >>$APPTAINER_ENVIRONMENT", "echo A=1 >>$APPTAINER_ENVIRONMENT: APPTAINER_ENVIRONMENT is"),
        ("%runscript\n    #!/usr/bin/python3\n    a", "#!/usr/bin/python3: a script of no shell"),
        ("%labels\n    a", "a: a label without a name of letters, or without a text"),
        ("%other\n    a", "%other: no section that dray knows"),
        ("From: b", "From: b: nothing that a Dockerfile has"),
        ("MirrorURL: x", "MirrorURL: x: nothing that a Dockerfile has"),
    ],
)  # fmt: skip
def test_a_line_that_a_dockerfile_cannot_say(folder: Path, lines: str, why: str) -> None:
    with pytest.raises(ConfigError, match="1 line cannot be carried into a Dockerfile") as refused:
        converted(folder, f"Bootstrap: docker\nFrom: a\n{lines}\n", "X.def")
    assert refused.value.details["found"].partition(": ")[2].startswith(why), refused.value


@pytest.mark.parametrize("kind", ["docker-daemon", "localimage", "debootstrap", "library", "buildkit"])
def test_a_base_that_is_no_image_of_a_registry(folder: Path, kind: str) -> None:
    with pytest.raises(ConfigError) as refused:
        converted(folder, f"Bootstrap: {kind}\nFrom: a\n", "X.def")
    assert refused.value.details["found"].startswith(f"line 1: Bootstrap: {kind}: a Dockerfile begins with an image")
