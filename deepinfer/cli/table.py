"""Columns of text on standard output."""

from collections.abc import Mapping

from deepinfer.cli.units import show_bytes


def print_bytes(title: str, amounts: Mapping[str, int], notes: Mapping[str, str] | None = None) -> None:
    """Print a titled section: a line with exact bytes, rounded bytes and a note for each name, then their sum."""
    print(f"\n{title}")
    for name, amount in amounts.items():
        _print_row(name, amount, (notes or {}).get(name, ""))
    if len(amounts) > 1:
        _print_row("sum", sum(amounts.values()), "")


def print_facts(title: str, facts: Mapping[str, object]) -> None:
    """Print a titled section: a line with name and value for each fact."""
    print(f"\n{title}")
    for name, value in facts.items():
        print(f"  {name:<22}{value}")


def _print_row(name: str, amount: int, note: str) -> None:
    print(f"  {name:<22}{amount:>20,} {show_bytes(amount):>10}  {note}".rstrip())
