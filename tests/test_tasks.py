"""The generated exercises: right answers, strict checks, and a split that holds."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.arithmetic import add_reasoning, subtract_reasoning
from train.digit_images import _number, draw_number
from train.recall import Filler, Lengths, short_pieces
from train.sample import Split, belongs, stream
from train.tasks import EVALUATED, TRAINING_ONLY, TaskMaker, check

SHORT = ("add2", "add3", "json", "image")
FILLER = Filler(len, ["One sentence about rivers. Another sentence about hills and the long road between them."] * 3)
LENGTHS = Lengths(nearest=300, farthest=900, prompt=1500)


def maker(split: Split) -> TaskMaker:
    return TaskMaker(split, FILLER, LENGTHS)


def question(sample) -> str:
    content = sample.messages[0]["content"]
    return content if isinstance(content, str) else content[1]["text"]


@pytest.mark.parametrize("task", EVALUATED)
@pytest.mark.parametrize("split", list(Split))
def test_own_answer_passes_the_check(task, split):
    rng = stream(split, 3)
    for _ in range(50):
        sample = maker(split).make(task, rng)
        assert check(sample, sample.answer)


@pytest.mark.parametrize("task", EVALUATED + TRAINING_ONLY)
def test_same_seed_makes_the_same_samples(task):
    first, second = (maker(Split.TRAIN).make(task, stream(Split.TRAIN, 7, task)) for _ in range(2))
    assert question(first) == question(second)
    assert (first.answer, first.reasoning, first.thinking) == (second.answer, second.reasoning, second.thinking)
    assert [image.tobytes() for image in first.images] == [image.tobytes() for image in second.images]


@pytest.mark.parametrize("task", ["add2", "add3", "json"])
def test_training_and_evaluation_share_no_exercise(task):
    def facts(split):
        rng = stream(split, 1)
        samples = [maker(split).make(task, rng) for _ in range(1500)]
        return {sample.reasoning or _sentence(sample) for sample in samples}

    assert not facts(Split.TRAIN) & facts(Split.EVAL)


def _sentence(sample) -> str:
    pieces = re.split(r"\n|: ", question(sample))
    return next(piece for piece in pieces if all(str(value) in piece for value in sample.expected.values()))


def test_long_image_numbers_are_split():
    def numbers(split):
        rng = stream(split, 2)
        return {number for number in (_number(rng, split) for _ in range(2000)) if len(number) > 2}

    train, evaluation = numbers(Split.TRAIN), numbers(Split.EVAL)
    assert len(evaluation) > 100
    assert not train & evaluation


@given(st.text(min_size=1))
def test_a_key_belongs_to_exactly_one_split(key):
    assert belongs(key, Split.TRAIN) != belongs(key, Split.EVAL)


def test_streams_of_splits_and_seeds_differ():
    drawn = {stream(split, seed).random() for split in Split for seed in range(20)}
    assert len(drawn) == 40


@given(st.integers(10, 999), st.integers(10, 999))
def test_every_line_of_addition_is_true(a, b):
    first, *lines, last = add_reasoning(a, b).splitlines()
    assert first == f"{a}+{b}"
    assert int(last) == a + b
    assert len(lines) == max(len(str(a)), len(str(b)))
    for line in lines:
        left, right = line.split("=")
        assert sum(map(int, left.split("+"))) == int(right)


@given(st.integers(10, 99), st.integers(10, 99))
def test_every_line_of_subtraction_is_true(a, b):
    first, relation, *lines, digits, last = subtract_reasoning(a, b).splitlines()
    assert first == f"{a}-{b}"
    sign = relation[len(str(a))]
    assert {"<": a < b, ">": a > b, "=": a == b}[sign]
    for line in lines:
        left, right = line.split("=")
        top, *taken = map(int, left.split("-"))
        assert 0 <= top - sum(taken) == int(right) <= 9
    padded, value = digits.split("=")
    assert padded == "".join(line.split("=")[1] for line in reversed(lines))
    assert int(padded) == int(value) == abs(a - b)
    assert int(last) == a - b


def test_two_digit_exercises_cover_both_operations_and_negative_values():
    rng = stream(Split.EVAL, 5)
    samples = [maker(Split.EVAL).make("add2", rng) for _ in range(300)]
    assert all(sample.thinking for sample in samples)
    assert any(sample.expected < 0 for sample in samples)
    assert any(sample.expected > 99 for sample in samples)
    assert {"+", "-"} <= {re.search(r"\d([+-])\d", sample.reasoning).group(1) for sample in samples}


def test_operands_stand_in_the_question():
    rng = stream(Split.TRAIN, 6)
    for task in ("add2", "add3"):
        for _ in range(200):
            sample = maker(Split.TRAIN).make(task, rng)
            operands = re.findall(r"\d+", sample.reasoning.splitlines()[0])
            assert sorted(re.findall(r"\d+", question(sample))) == sorted(operands)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("The answer is \\boxed{{{}}}.", True),
        ("\\boxed{{ {} }}", True),
        ("{}", False),
        ("\\boxed{{1{}}}", False),
        ("\\boxed{{{}}} or \\boxed{{3}}", False),
        ("", False),
    ],
)
def test_boxed_answers(reply, right):
    sample = maker(Split.EVAL).make("add3", stream(Split.EVAL, 1))
    assert check(sample, reply.format(sample.expected)) is right


def test_json_answers_hold_values_of_the_sentence_in_the_order_asked():
    rng = stream(Split.TRAIN, 9)
    for _ in range(200):
        sample = maker(Split.TRAIN).make("json", rng)
        text = question(sample)
        places = [re.search(rf"\b{key}\b", text).start() for key in sample.expected]
        found = json.loads(sample.answer)
        assert found == sample.expected
        assert all(str(value) in text for value in found.values())
        if re.match(r"Extract|Return", text):
            assert places == sorted(places)


def test_json_check_is_exact():
    sample = maker(Split.EVAL).make("json", stream(Split.EVAL, 4))
    pairs = list(sample.expected.items())
    assert check(sample, json.dumps(sample.expected))
    assert not check(sample, json.dumps(dict(reversed(pairs))))
    assert not check(sample, json.dumps(dict(pairs[:-1])))
    assert not check(sample, json.dumps({key: str(value) + "x" for key, value in pairs}))
    assert not check(sample, sample.answer[:-1])
    assert not check(sample, json.dumps(pairs))


def test_passkey_and_digits_checks():
    passkey = maker(Split.EVAL).make("passkey", stream(Split.EVAL, 4))
    assert check(passkey, f"It is {passkey.expected}!")
    assert not check(passkey, f"{passkey.expected[:-1]}")
    assert not check(passkey, f"7{passkey.expected}")
    picture = maker(Split.EVAL).make("image", stream(Split.EVAL, 4))
    assert not check(picture, f"{picture.expected} or {picture.expected}0")
    assert not check(picture, "no digits")


@given(st.integers(0, 10_000))
def test_passkey_is_stated_once_at_the_asked_distance(seed):
    sample = maker(Split.EVAL).make("passkey", stream(Split.EVAL, seed))
    text = question(sample)
    assert text.count(sample.expected) == 1
    assert re.fullmatch(r"\d{5}", sample.expected)
    after = len(text) - text.index(sample.expected)
    assert LENGTHS.nearest <= after <= LENGTHS.farthest + 96
    # The maker is told that a token is a character; its fixed parts have more of these than it reckons tokens.
    assert len(text) <= LENGTHS.prompt + 64


def test_passkey_uses_passages_and_generated_sentences():
    rng = stream(Split.TRAIN, 1)
    texts = "".join(question(maker(Split.TRAIN).make("passkey", rng)) for _ in range(5))
    assert "sentence about rivers" in texts
    assert any(word in texts for word in (" harbour", " window", " bridge", " river "))


def test_multikey_asks_for_every_code_once():
    sample = maker(Split.TRAIN).make("multikey", stream(Split.TRAIN, 11))
    text = question(sample)
    asked = [re.search(r"code of the (\w+ \w+)\?", message["content"]) for message in sample.messages[::2]]
    names = [match.group(1) for match in asked]
    assert len(set(names)) == len(names) >= 2
    replies = [message["content"] for message in sample.messages[1::2]] + [sample.answer]
    for name, reply in zip(names, replies, strict=True):
        assert reply.startswith(f"The code of the {name} is ")
        assert reply in text


@pytest.mark.parametrize(("width", "height"), [(96, 32), (32, 24), (64, 48)])
def test_pictures_have_the_size_asked_for_and_contrast(width, height):
    rng = stream(Split.TRAIN, 2)
    for text in ("7", "4711"):
        image = draw_number(rng, text, width, height)
        assert (image.mode, image.size) == ("RGB", (width, height))
        low, high = image.convert("L").getextrema()
        assert high - low > 80


def test_general_chats_answer_the_last_question():
    rng = stream(Split.TRAIN, 8)
    samples = [maker(Split.TRAIN).make("general", rng) for _ in range(400)]
    assert all(sample.messages[-1]["role"] == "user" and sample.answer for sample in samples)
    assert all(bool(sample.reasoning) == sample.thinking for sample in samples)
    assert {True, False} == {sample.thinking for sample in samples}
    assert any(sample.messages[0]["role"] == "system" for sample in samples)
    assert len({sample.answer for sample in samples}) > 200


def test_short_pieces_lose_no_short_paragraph():
    text = "A first paragraph that is long enough to stay.\n\n" + "This sentence is repeated. " * 60
    pieces = short_pieces(text)
    assert pieces[0] == "A first paragraph that is long enough to stay."
    assert max(map(len, pieces)) <= 400
    assert sum(piece.count("repeated") for piece in pieces) == 60


def test_unknown_task_and_missing_filler_are_errors():
    with pytest.raises(ValueError, match="unknown task 'sums'"):
        maker(Split.TRAIN).make("sums", stream(Split.TRAIN, 0))
    with pytest.raises(ValueError, match="needs a Filler"):
        TaskMaker(Split.TRAIN).make("passkey", stream(Split.TRAIN, 0))
