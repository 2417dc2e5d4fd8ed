"""Self-consistency: think about one riddle many times, and take the answer most often reached.

The prompt is computed once. Every branch shares its KV, thinks on at random and comes to an
answer of its own; single ones are often wrong, their majority seldom. After Wang et al.,
"Self-Consistency Improves Chain of Thought Reasoning in Language Models", 2022.
"""

import argparse
import re
import sys
from collections import Counter

from accounts import Accounts
from watching import WatchingTransport

from agentkv import AgentKVError, Client

PROMPT = """\
Riddle: It has a long trunk and big ears, and it lives in herds.
Thought: A long trunk and big ears are parts of a very large animal.
Answer: elephant

Riddle: It is full of pages, and you read it.
Thought: Pages that you read are bound between two covers.
Answer: book

Riddle: It is white and cold, and it falls from the sky in winter.
Thought: What falls from the sky in winter is frozen water.
Answer: snow

Riddle: {riddle}
Thought:"""
RIDDLE = "It has many colors, and it is seen in the sky after rain."
ANSWER = re.compile(r"Answer: *(?:an? |the )?([a-z]+)", re.IGNORECASE)


def main(options: argparse.Namespace) -> None:
    """Asks, lets the branches think, and counts their votes."""
    accounts = Accounts()
    with (
        Client(transport=WatchingTransport(options.address, accounts)) as client,
        client.create(PROMPT.format(riddle=options.riddle)) as root,
    ):
        branches = root.complete_branches(
            options.n,
            max_tokens=32,
            temperature=options.temperature,
            top_p=0.9,
            seed=options.seed,
            stop="\n\n",
        )
        answers = [answer_in(branch.text) for branch in branches]
        for branch, answer in zip(branches, answers, strict=True):
            accounts.note(branch.context, answer or "no answer")
        winner = print_votes(options.riddle, Counter(filter(None, answers)))
        print("\nThe first branch that says so:")
        print(branches[answers.index(winner)].text.strip())
        accounts.report(client)


def answer_in(text: str) -> str | None:
    """Finds the answer that a branch came to, if it came to one."""
    found = ANSWER.search(text)
    return found[1].lower() if found else None


def print_votes(riddle: str, votes: Counter[str]) -> str:
    """Prints the votes, and returns the answer with the most of them."""
    if not votes:
        sys.exit("No branch came to an answer.")
    print(f"Riddle: {riddle}\n")
    for answer, count in votes.most_common():
        print(f"{answer:>15} {count:3} {'#' * count}")
    winner, count = votes.most_common(1)[0]
    print(f"\nMajority: {winner}, {count} of {votes.total()} votes")
    return winner


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Answer a riddle by a majority of branches.")
    parser.add_argument(
        "address", nargs="?", default="127.0.0.1:50051", help="server (default: %(default)s)"
    )
    parser.add_argument("--riddle", default=RIDDLE, help="what to ask (default: %(default)s)")
    parser.add_argument("--n", type=int, default=16, help="branches (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 makes all equal (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="another one gives other thoughts")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_options())
    except AgentKVError as error:
        sys.exit(f"{type(error).__name__}: {error}")
