# What a launch script finds in place of the programs of a machine (shell.py). Nothing that it starts exists: each
# command is written down, and prints a mark, U+E000 @LINE WORDS U+E001 (blanks are U+E002), in place of what only a machine can tell.
unset BASH_ENV HOSTNAME
set -T
__outer=()

command_not_found_handle() {
    local at next record=/.calls/$BASHPID-$RANDOM$RANDOM words
    for ((at = 1; at < $#; at++)); do # srun bash -c "torchrun ..."
        next=$((at + 1))
        if [[ ${!at} =~ ^-[a-z]*c$ && ${@:at-1:1} =~ (^|/)(ba)?sh$ ]]; then
            __outer=("${@:1:at-2}" "${__outer[@]}")
            eval "${!next}"
            return
        fi
    done
    printf '%s\0' "$__line" $# "$@" "${__outer[@]}" >"$record"
    echo "$record" >>/.calls/order
    local IFS=' '
    words="$*"
    words=${words//$__open/$}
    words=${words//$__close/}
    printf '%s' "$__open@$__line$__blank${words//[[:space:]]/$__blank}$__close"
}

bash() { command_not_found_handle bash "$@"; }
sh() { command_not_found_handle sh "$@"; }
exec() { [ $# -eq 0 ] || "$@"; }
exit() { return 0; } # a script that looks for its files ends before the training
cd() { return 0; }
pushd() { return 0; }
popd() { return 0; }
pwd() { echo .; }
mkdir() { return 0; } # folders are made where something is written into them
realpath() { echo "${@: -1}"; }
readlink() { echo "${@: -1}"; }
dirname() { [[ $1 == */* ]] && echo "${1%/*}" || echo .; }
basename() {
    local name=${1##*/}
    echo "${name%"${2-}"}"
}
cat() {
    local file line
    [ $# -gt 0 ] || set -- -
    for file; do
        if [[ $file == - ]]; then
            while IFS= read -r line || [[ $line ]]; do printf '%s\n' "$line"; done
        elif [[ -f $file ]]; then
            printf '%s\n' "$(<"$file")"
        else
            command_not_found_handle cat "$@"
            return
        fi
    done
}
tee() {
    local file text
    text=$(cat)
    for file; do [[ $file == -* ]] || printf '%s\n' "$text" >"$file"; done
    printf '%s\n' "$text"
}
xargs() { # of a list that `find FOLDER` would make: one call for FOLDER
    local list replaced='' words=()
    list=$(cat)
    [[ $list =~ @[0-9]+${__blank}find${__blank}([^$__close]+) ]] && list=${BASH_REMATCH[1]%%"$__blank"*} && list=${list%/}
    while [[ ${1-} == -* ]]; do
        case $1 in
            -I) replaced=$2 && shift ;;
            -I*) replaced=${1#-I} ;;
            -[PnLsd]) shift ;;
        esac
        shift
    done
    [[ $replaced ]] && words=("${@//"$replaced"/$list}") || words=("$@" "$list")
    "${words[@]}"
}

__tests() { # write down which variables without a value a test reads; $1: its text, then the script's arguments
    local text=$1 name
    [[ ${BASH_SOURCE[2]-} == /.stubs || $text == *' -'[zn]' '* ]] && return # it asks whether there is a value
    shift
    while [[ $text =~ \$\{?([A-Za-z0-9_]+)(.*) ]]; do
        name=${BASH_REMATCH[1]} text=${BASH_REMATCH[2]}
        [[ $name == [0-9]* || ${!name-} ]] || continue
        [[ ${!name-} != *$__open* ]] || printf '%s %s\n' "$__line" "$name" >>/.calls/tests
    done
}
