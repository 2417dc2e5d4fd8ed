"""Tool plans: try three tools on one question, each on a branch, and keep the best answer.

All plans share the KV of a long prompt. On each branch the model writes a call, a local function
runs it, its result is appended to that branch alone, and the model answers. Score then asks each
branch whether its answer is any good; the best one stays, the others are released.
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

from accounts import Accounts
from local_tools import calculate, convert, lookup
from watching import WatchingTransport

from agentkv import AgentKVError, Client, ContextHandle

PROMPT = """\
Question: A film lasts 2 hours. How many minutes is that?
Tool: convert(2 hours to minutes)
Result: 120 minutes
Answer: 120 minutes
Good: yes

Question: A box holds 6 eggs. How many eggs do 5 boxes hold?
Tool: calculate(5 * 6)
Result: 30
Answer: 30 eggs
Good: yes

Question: What is a puppy?
Tool: lookup(puppy)
Result: a puppy is a young dog
Answer: a young dog
Good: yes

Question: A bag weighs 4 kilograms. How many grams is that?
Tool: convert(4 kilograms to grams)
Result: 4000 grams
Answer: 4000 grams
Good: yes

Question: A kite flies for 8 minutes. How many seconds is that?
Tool: lookup(kite)
Result: a kite is a toy that flies in the wind
Answer: not known
Good: no

Question: A plank is 2 meters long. How many centimeters is that?
Tool: convert(2 meters to centimeters)
Result: 200 centimeters
Answer: 200 centimeters
Good: yes

Question: A string is 9 yards long. How many feet is that?
Tool: calculate(9 yards)
Result: error, this is not a number
Answer: not known
Good: no

Question: A farm is 5 years old. How many months is that?
Tool: lookup(farm)
Result: a farm is land where food is grown
Answer: not known
Good: no

Question: {question}
Tool:"""
QUESTION = "A table is 6 feet long. How many inches is that?"
TOOLS: tuple[Callable[[str], str], ...] = (convert, calculate, lookup)


class Plan(NamedTuple):
    """One plan, carried out on a branch of its own."""

    branch: ContextHandle
    call: str
    result: str
    answer: str
    score: float
    """How much likelier the answer is called good than not, as a natural logarithm."""


def main(options: argparse.Namespace) -> None:
    """Carries out every plan, and keeps the best."""
    accounts = Accounts()
    with (
        Client(transport=WatchingTransport(options.address, accounts)) as client,
        client.create(PROMPT.format(question=options.question)) as root,
    ):
        plans = [
            carry_out(branch, tool)
            for branch, tool in zip(root.fork(len(TOOLS)), TOOLS, strict=True)
        ]
        best = max(plans, key=lambda plan: plan.score)
        print(f"Question: {options.question}\n")
        for plan in plans:
            accounts.note(plan.branch, f"{plan.call} {plan.score:+.2f}")
            print(f"{plan.call} = {plan.result}")
            print(f"    answer: {plan.answer}, score {plan.score:+.2f}")
        accounts.report(client)  # before the losers go: this is when most is held
        for plan in plans:
            if plan is not best:
                plan.branch.release()
    print(f"\nKept: {best.call}. Answer: {best.answer}")
    if best.score < 0:
        sys.exit("No answer is good.")


def carry_out(branch: ContextHandle, tool: Callable[[str], str]) -> Plan:
    """Lets the model call a tool, gives it the result, and lets it answer."""
    branch.extend(f" {tool.__name__}(")
    argument = branch.complete(max_tokens=16, stop=")").text
    try:
        result = tool(argument)
    except ValueError as error:
        result = f"error, {error}"
    branch.extend(f"\nResult: {result}\nAnswer:")
    answer = branch.complete(max_tokens=12, stop="\n").text.strip()
    good, bad = branch.score(["Good: yes", "Good: no"])
    return Plan(branch, f"{tool.__name__}({argument})", result, answer, good.total - bad.total)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Answer a question with three tools, each on a branch, and keep the best."
    )
    parser.add_argument(
        "address", nargs="?", default="127.0.0.1:50051", help="server (default: %(default)s)"
    )
    parser.add_argument("--question", default=QUESTION, help="what to ask (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_options())
    except AgentKVError as error:
        sys.exit(f"{type(error).__name__}: {error}")
