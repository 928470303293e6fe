"""The bundled checkpoint reads numbers in pictures: with prefix cache, batch invariance and, by default, drafts on."""

from pathlib import Path

import pytest
from llm_tools import check_at_rest, parts

from deepinfer import LLM
from eval.questions import QuestionMaker
from eval.replies import answer

ROOT = Path(__file__).parents[1]
QUESTIONS = 12


@pytest.mark.parametrize("invariant", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_numbers_in_pictures_are_read(invariant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, so that the second time finds what it can of the first."""
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", invariant)
    llm = LLM(ROOT / "checkpoints" / "mini", prefix_cache=True, page_size=16)
    questions = QuestionMaker(llm.config, parts(llm).tokenizer).make({"image": QUESTIONS}, "images", 5)
    replies = answer(llm, questions, shown=False), answer(llm, questions, shown=False)
    for made in replies:
        assert sum(reply.correct for reply in made) >= 0.9 * QUESTIONS
    contents = {image.digest for question in questions for image in question.images}
    assert llm.statistics.pictures.encoded == len(contents)
    check_at_rest(llm)
