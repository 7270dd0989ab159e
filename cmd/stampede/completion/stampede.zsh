#compdef stampede
# Completion of stampede in zsh: stampede completion zsh > a folder of $fpath/_stampede
_stampede() {
  local line
  local -a found
  for line in "${(@f)$("${words[1]}" complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
    case "$line" in
    '') ;;
    :files) _files ;;
    :dirs) _files -/ ;;
    *) found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}") ;;
    esac
  done
  (( $#found )) && _describe 'stampede' found
}
if [ "$funcstack[1]" = _stampede ]; then _stampede "$@"; else compdef _stampede stampede; fi
