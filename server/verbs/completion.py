"""`blasst completion SHELL`: a script that completes verbs, actions and options.

Made from the parsers of the verbs, once; pressing Tab runs no Python.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from collections.abc import Iterator

from blasst.server.cli import GROUP

SHELLS = ("bash", "zsh", "fish")
Words = dict[str, list[str]]
_EPILOG = """examples:
  blasst completion bash > ~/.local/share/bash-completion/completions/blasst
  blasst completion zsh > ~/.zfunc/_blasst    (with fpath+=(~/.zfunc) before compinit)
  blasst completion fish > ~/.config/fish/completions/blasst.fish
"""
_BASH = """# Completion of blasst for bash; made by `blasst completion bash`.
_blasst() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" key="" words="" i
    for ((i = 1; i < COMP_CWORD && i < 3; i++)); do
        [[ ${{COMP_WORDS[i]}} == -* ]] && break
        key="${{key:+$key }}${{COMP_WORDS[i]}}"
    done
    case $prev in
        --*file|--*dir|--out|--presets|--tls-*|--uds|--follow|--canary)
            COMPREPLY=($(compgen -f -- "$cur")); return ;;
    esac
    while :; do
        case $key in
{cases}
        esac
        [[ -n $words || $key != *" "* ]] && break
        key="${{key%% *}}"
    done
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _blasst blasst
"""
_ZSH = """#compdef blasst
# Completion of blasst for zsh; made by `blasst completion zsh`.
_blasst() {{
    local key="" i
    local -a words_
    for ((i = 2; i < CURRENT && i < 4; i++)); do
        [[ ${{words[i]}} == -* ]] && break
        key="${{key:+$key }}${{words[i]}}"
    done
    case ${{words[CURRENT-1]}} in
        --*file|--*dir|--out|--presets|--tls-*|--uds|--follow|--canary) _files; return ;;
    esac
    while :; do
        case $key in
{cases}
        esac
        [[ -n $words_ || $key != *" "* ]] && break
        key="${{key%% *}}"
    done
    compadd -- $words_
}}
_blasst "$@"
"""
_FISH = """# Completion of blasst for fish; made by `blasst completion fish`.
function __blasst_words
    set -l key
    for word in (commandline -opc)[2..3]
        string match -q -- '-*' $word; and break
        set -a key $word
    end
    while true
        switch "$key"
{cases}
        end
        set -q key[2]; or return
        set -e key[-1]
    end
end
function __blasst_wants_a_file
    string match -qr -- '^--(.*file|.*dir|out|presets|tls-.*|uds|follow|canary)$' \\
        (commandline -opc)[-1]
end
complete -c blasst -n 'not __blasst_wants_a_file' -f -a '(__blasst_words)'
complete -c blasst -n __blasst_wants_a_file -F
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the completion script of a shell."
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    words = completions()
    if args.shell == "fish":
        lines = (
            f"            case '{key}'\n                printf '%s\\n' {' '.join(w)}; return"
            for key, w in words.items()
        )
        print(_FISH.format(cases="\n".join(lines)), end="")
    elif args.shell == "bash":
        cases = (f'            "{key}") words="{" ".join(w)}" ;;' for key, w in words.items())
        print(_BASH.format(cases="\n".join(cases)), end="")
    else:
        cases = (f'            "{key}") words_=({" ".join(w)}) ;;' for key, w in words.items())
        print(_ZSH.format(cases="\n".join(cases)), end="")
    return 0


def completions() -> Words:
    """ "" -> the verbs, "VERB" and "VERB ACTION" -> what may follow them."""
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    words: Words = {"": [*(point.name for point in points), "--help", "--version"]}
    for point in points:
        try:
            module = importlib.import_module(point.module)
        except ModuleNotFoundError:
            # Its extra is not installed: the name alone completes.
            continue
        parser = argparse.ArgumentParser(prog=point.name)
        module.configure(parser)
        words.update(_of(point.name, parser))
    return words


def _of(key: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    found: list[str] = []
    for action in parser._actions:
        found += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices
            for name, below in action.choices.items():
                yield from _of(f"{key} {name}", below)
        elif not action.option_strings and action.choices:
            found += map(str, action.choices)
    yield key, sorted(set(found))
