"""Column-wise addition and subtraction with short reasoning: one line a column, the lowest digit first."""

import random

from train.sample import Sample, Split, belongs, user

ADDITIONS = (
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "Compute {a} + {b}.",
    "Calculate {a}+{b}.",
    "{a} + {b} = ?",
    "{a}+{b}=",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Find the sum of {a} and {b}.",
    "What do you get when you add {b} to {a}?",
    "I have {a} apples and buy {b} more. How many apples do I have?",
    "A bus carries {a} people and {b} more get on. How many people are on the bus?",
)
SUBTRACTIONS = (
    "What is {a} - {b}?",
    "What is {a}-{b}?",
    "Compute {a} - {b}.",
    "Calculate {a}-{b}.",
    "{a} - {b} = ?",
    "{a}-{b}=",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Take {b} away from {a}.",
    "What is the difference {a} minus {b}?",
)


def _columns(a: int, b: int, subtract: bool) -> list[str]:
    """Lines of the written method for a + b, or a - b with a >= b: `7+8=15`, then `4+3+1=8` with the carry."""
    width = max(len(str(a)), len(str(b)))
    lines, carry = [], 0
    for column in range(width):
        x, y = (number // 10**column % 10 for number in (a, b))
        carried = f"{'-' if subtract else '+'}{carry}" if column else ""
        if subtract:
            borrow = x - y - carry < 0
            top = x + 10 * borrow
            lines.append(f"{top}-{y}{carried}={top - y - carry}")
            carry = int(borrow)
        else:
            total = x + y + carry
            lines.append(f"{x}+{y}{carried}={total}")
            carry = total // 10
    return lines


def add_reasoning(a: int, b: int) -> str:
    """`47+38`, a line a column, the sum."""
    return "\n".join([f"{a}+{b}", *_columns(a, b, subtract=False), str(a + b)])


def subtract_reasoning(a: int, b: int) -> str:
    """`38-47`, the comparison, a line a column of larger minus smaller, the digits, the signed result."""
    high, low = max(a, b), min(a, b)
    relation = "<" if a < b else ">" if a > b else "="
    digits = str(high - low).zfill(len(str(high)))
    lines = [f"{a}-{b}", f"{a}{relation}{b}", *_columns(high, low, subtract=True), f"{digits}={high - low}"]
    return "\n".join([*lines, str(a - b)])


def _sample(task: str, question: str, reasoning: str, value: int) -> Sample:
    return Sample(task, [user(question)], True, f"The answer is \\boxed{{{value}}}.", value, reasoning)


def _operands(rng: random.Random, split: Split, low: int, high: int, operation: str) -> tuple[int, int]:
    while True:
        a, b = rng.randint(low, high), rng.randint(low, high)
        if belongs(f"{a}{operation}{b}", split):
            return a, b


def make_add2(rng: random.Random, split: Split) -> Sample:
    """Two-digit addition or subtraction; the difference may be negative."""
    subtract = rng.random() < 0.5
    a, b = _operands(rng, split, 10, 99, "-" if subtract else "+")
    if subtract:
        return _sample("add2", rng.choice(SUBTRACTIONS).format(a=a, b=b), subtract_reasoning(a, b), a - b)
    return _sample("add2", rng.choice(ADDITIONS).format(a=a, b=b), add_reasoning(a, b), a + b)


def make_add3(rng: random.Random, split: Split) -> Sample:
    """Three-digit addition."""
    a, b = _operands(rng, split, 100, 999, "+")
    return _sample("add3", rng.choice(ADDITIONS).format(a=a, b=b), add_reasoning(a, b), a + b)
