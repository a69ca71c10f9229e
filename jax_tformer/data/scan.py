"""SCAN: all commands of a small grammar, and what they have an agent do (Lake & Baroni, 2018, appendix A).

    turn left twice                 -> I_TURN_LEFT I_TURN_LEFT
    jump opposite left and walk     -> I_TURN_LEFT I_TURN_LEFT I_JUMP I_WALK
    run after look around right     -> I_TURN_RIGHT I_LOOK (4 times) I_RUN

There are 20,910. Three splits ask whether who has learnt some of them can do the others: by chance, all that take
more actions than those of training (`is_long`), and all that combine a verb known by itself alone (`combines_jump`).
"""

from collections.abc import Callable, Iterator
from itertools import product, repeat

_VERBS = ("walk", "look", "run", "jump")
_TIMES = {"": 1, " twice": 2, " thrice": 3}
_LONGEST = 22
"""Actions of the longest commands of training."""


def commands() -> dict[str, tuple[str, ...]]:
    """Returns all commands with their actions."""
    verbs: dict[str, tuple[str, ...]] = {verb: (f"I_{verb.upper()}",) for verb in _VERBS}
    phrases = dict(verbs)
    for (verb, does), side in product([*verbs.items(), ("turn", ())], ("left", "right")):
        turn = (f"I_TURN_{side.upper()}",)
        phrases[f"{verb} {side}"] = turn + does
        phrases[f"{verb} opposite {side}"] = 2 * turn + does
        phrases[f"{verb} around {side}"] = 4 * (turn + does)
    repeated = product(phrases.items(), _TIMES.items())
    sentences = {phrase + word: times * does for (phrase, does), (word, times) in repeated}
    made = dict(sentences)
    for (first, does), (second, does_too) in product(sentences.items(), repeat=2):
        made[f"{first} and {second}"] = does + does_too
        made[f"{first} after {second}"] = does_too + does
    return made


def pairs(split: str) -> Iterator[tuple[str, str]]:
    """Yields all pairs of a command and its actions; in "scan-jump" one training pair in ten is the verb by itself."""
    made = {command: " ".join(actions) for command, actions in commands().items()}
    yield from made.items()
    if split == "scan-jump":
        others = sum("jump" not in command.split() for command in made)
        yield from repeat(("jump", "I_JUMP"), others // 9 - 1)


def is_long(command: str, actions: str) -> bool:
    """Whether a pair is one of the 3,920 that take more actions than those of training."""
    return len(actions.split()) > _LONGEST


def combines_jump(command: str, actions: str) -> bool:
    """Whether a pair is one of the 7,706 that have the verb with other words."""
    return command != "jump" and "jump" in command.split()


HELD_OUT: dict[str, Callable[[str, str], bool]] = {"scan-length": is_long, "scan-jump": combines_jump}
"""Which pairs of a split are held out; of others, a share by chance."""
