"""Tree of thoughts: find a chain of animals, each beginning with the last letter of the one before.

A search over forked contexts. Each step *proposes* words on many branches, lets the rules throw
out what they can, *scores* the rest as animals, keeps the best and releases the others. When no
word is left the chain is stuck, and the search forks again from an earlier token: any token of a
living context will do, although the context that first held it was released long ago. After Yao
et al., "Tree of Thoughts: Deliberate Problem Solving with Large Language Models", 2023.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from accounts import Accounts
from watching import WatchingTransport

from agentkv import AgentKVError, Client, ContextHandle, GeneratedBranch

PROMPT = """\
Animals by their first letter.
B: bear
L: lion
H: horse
M: mouse
{first}: {word}
{last}:"""
CRITIC = """\
A rose is a kind of plant.
A hammer is a kind of tool.
A trout is a kind of animal.
A bread is a kind of food.
A tailor is a kind of person.
A"""
KINDS = ("animal", "plant", "tool", "food", "person", "place", "thing")
MIN_SCORE = 2.0
"""By how much a word must be an animal rather than anything else, as a natural logarithm."""

Branch = GeneratedBranch[ContextHandle]


@dataclass
class Chain:
    """The chain so far, and the one context that holds it and ends where a word is to follow."""

    context: ContextHandle
    words: list[str]
    ends: list[int]
    """For each word, the length of the context when the word after it was to follow."""
    stuck: set[tuple[str, ...]] = field(default_factory=set)
    """Chains that nothing followed."""

    def allows(self, word: str) -> bool:
        """Whether the rules let a word follow."""
        words = (*self.words, word)
        return bool(
            re.fullmatch("[a-z]{3,}", word)
            and word[0] == self.words[-1][-1]
            and word not in self.words
            and words not in self.stuck
        )

    def advance(self, branch: Branch) -> None:
        """Goes on with the word that a branch proposed."""
        word = branch.text.strip()
        num_word_tokens = branch.completion.num_tokens_before_stop
        assert num_word_tokens is not None
        self.context.release()
        self.context = branch.context
        self.context.truncate(self.ends[-1] + num_word_tokens)  # drops the end of the line
        self.context.extend(f"\n{word[-1].upper()}:")
        self.words.append(word)
        self.ends.append(self.context.length)

    def go_back(self) -> None:
        """Takes the last word back, by a fork from the token before it."""
        if len(self.words) > 1:
            self.stuck.add(tuple(self.words))
            self.words.pop()
            self.ends.pop()
            earlier = self.context.fork_one(at=self.ends[-1])
            self.context.release()
            self.context = earlier


def main(options: argparse.Namespace) -> None:
    """Searches, and says what was found."""
    accounts = Accounts()
    start = options.start
    prompt = PROMPT.format(first=start[0].upper(), word=start, last=start[-1].upper())
    with Client(transport=WatchingTransport(options.address, accounts)) as client:
        root, critic = client.create(prompt), client.create(CRITIC)
        accounts.note(root, start)
        accounts.note(critic, "critic: judges what words mean")
        chain = Chain(root, [start], [root.length])
        print(f"A chain of {options.length} animals, each beginning as the one before ends\n")
        for step in range(options.max_steps):
            branches = chain.context.complete_branches(
                options.n,
                max_tokens=6,
                temperature=0.9,
                seed=1000 * options.seed + step,
                stop="\n",
            )
            best = pick(chain, critic, branches)
            for branch in branches:
                if branch is not best:
                    branch.context.release()
            if best is None:
                chain.go_back()
                accounts.note(chain.context, f"{chain.words[-1]}, again from here")
                continue
            accounts.note(best.context, best.text.strip())
            chain.advance(best)
            if len(chain.words) == options.length:
                break
        accounts.report(client)
    if len(chain.words) < options.length:
        sys.exit(f"\nNot solved in {options.max_steps} steps.")
    print(f"\nSolved: {' '.join(chain.words)}")


def pick(chain: Chain, critic: ContextHandle, branches: Iterable[Branch]) -> Branch | None:
    """Finds the branch with the best word, prints the step; None when there is no good word."""
    proposed = {branch.text.strip(): branch for branch in branches if branch.completion.stop}
    scores = {word: judge(critic, word) for word in proposed if chain.allows(word)}
    ranked = sorted(scores, key=lambda word: -scores[word])
    words = ", ".join(f"{word} {scores[word]:+.1f}" for word in ranked)
    print(" ".join(chain.words), end=" -> ")
    if not ranked:
        print(f"stuck: the rules allow none of {', '.join(proposed)}")
    elif scores[ranked[0]] < MIN_SCORE:
        print(f"stuck: no animal among {words}")
    else:
        print(words)
        return proposed[ranked[0]]
    return None


def judge(critic: ContextHandle, word: str) -> float:
    """Scores how much likelier a word is called an animal than the next best kind."""
    with critic.fork_one() as verdict:
        verdict.extend(f" {word} is a kind of")
        animal, *others = verdict.score([f" {kind}" for kind in KINDS])
    return animal.total - max(other.total for other in others)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Find a chain of animals, each beginning with the last letter of the one "
        "before, by a tree of thoughts."
    )
    parser.add_argument(
        "address", nargs="?", default="127.0.0.1:50051", help="server (default: %(default)s)"
    )
    parser.add_argument("--start", default="bear", help="first animal (default: %(default)s)")
    parser.add_argument("--length", type=int, default=6, help="words (default: %(default)s)")
    parser.add_argument("--n", type=int, default=8, help="branches a step (default: %(default)s)")
    parser.add_argument(
        "--max-steps", type=int, default=30, help="when to give up (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=2, help="another one finds another chain")
    options = parser.parse_args()
    if not re.fullmatch("[a-z]+", options.start):
        parser.error("--start must be one word in small letters")
    if options.length < 2:
        parser.error("--length must be at least 2")
    return options


if __name__ == "__main__":
    try:
        main(parse_options())
    except AgentKVError as error:
        sys.exit(f"{type(error).__name__}: {error}")
