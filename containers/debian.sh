# shellcheck shell=bash
# Sourced where apt runs in a base: by debs.sh for an image's packages, by cluster/tools.sh for the builder. /mnt has what
# the host gives: its mirrors as a script of sed's, its certificates.

# Not /tmp, which is the host's where Apptainer builds.
readonly WORK=/var/cache/dray-fetch

debian::setup() {
    # A base has no certificates, and behind a proxy with its own they would not serve.
    options=(--quiet=2 -o APT::Sandbox::User=root -o Acquire::Retries=3)
    [[ ! -s /mnt/ca.crt ]] || options+=(-o Acquire::https::CAInfo=/mnt/ca.crt)
    mkdir -p "$WORK"
    find /etc/apt -path '/etc/apt/sources.list*' -type f | while read -r file; do
        debian::by_mirrors <"$file" >"$WORK/sources"
        cat "$WORK/sources" >"$file"
    done
    rm -f "$WORK/sources"
}

debian::by_mirrors() { if [[ -s /mnt/mirrors.sed ]]; then sed --regexp-extended --file=/mnt/mirrors.sed; else cat; fi; }

debian::apt() { DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" "$@"; }

# debian::archived STAMP: the base's sources, with Debian's dated archive as it was then in place of each mirror. The image
# that is pulled has its address in a comment above the mirror's, which by_mirrors has mapped already. Its Release files are
# past their date.
debian::archived() {
    # shellcheck disable=SC2016  # awk's
    find /etc/apt/sources.list.d -name '*.sources' ! -name zz-archive.sources -exec cat {} + 2>/dev/null |
        awk -v stamp="$1" -v RS= -v ORS='\n\n' '
            match($0, /# *https?:[^\n ]*\/[0-9]+T[0-9]+Z/) {
                address = substr($0, RSTART, RLENGTH)
                sub(/^# */, "", address)
                sub(/[0-9]+T[0-9]+Z$/, stamp, address)
                gsub(/#[^\n]*\n/, "")
                sub(/URIs:[^\n]*/, "URIs: " address "\nCheck-Valid-Until: no")
                print
            }'
}

# debian::see_archive STAMP: what the mirrors have still comes from them, since apt takes a version from its first source.
debian::see_archive() {
    local -r sources=/etc/apt/sources.list.d/zz-archive.sources
    debian::archived "$1" >"$sources"
    if [[ ! -s $sources ]]; then
        echo "dray: this base's apt sources do not say where Debian's dated archive is"
        rm "$sources"
        return 1
    fi
    echo "dray: look in Debian's archive of $1 for what the mirrors no longer have"
    debian::apt -o Acquire::Retries=0 -o Acquire::http::ConnectionTimeout=10 -o APT::Update::Error-Mode=any \
        -o "Dir::Etc::sourcelist=$sources" -o Dir::Etc::sourceparts=/dev/null -o APT::Get::List-Cleanup=0 update || {
        echo "dray: Debian's archive does not answer: $(sed -n 's/^URIs: //p' "$sources" | head -n 1)"
        rm "$sources"
        return 1
    }
}
