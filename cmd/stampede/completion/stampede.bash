# Completion of stampede in bash: source <(stampede completion bash)
_stampede() {
  local line
  COMPREPLY=()
  while IFS= read -r line; do
    case "$line" in
    :files) compopt -o default ;;
    :dirs) compopt -o dirnames ;;
    *) COMPREPLY+=("${line%%$'\t'*}") ;;
    esac
  done < <("$1" complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _stampede stampede
