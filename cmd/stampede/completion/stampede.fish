# Completion of stampede in fish: stampede completion fish > ~/.config/fish/completions/stampede.fish
function __stampede_complete
    set -l before (commandline -opc)
    for line in ($before[1] complete -- $before[2..-1] (commandline -ct) 2>/dev/null)
        switch $line
            case ':files'
                __fish_complete_path (commandline -ct)
            case ':dirs'
                __fish_complete_directories (commandline -ct)
            case '*'
                echo $line
        end
    end
end
complete -c stampede -f -a '(__stampede_complete)'
