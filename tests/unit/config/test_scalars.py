"""The field's type decides what a text means."""

import pytest

from unbroken.config.decode import InvalidValue, decode_value
from unbroken.config.document import all_fields
from unbroken.config.source import Place, Scalar

HERE = Place("run.yaml", 1)
WHOLE = "training.max_steps"
NUMBER = "optimizer.learning_rate"
SWITCH = "training.compile"
TEXT = "training.output_dir"
WORD = "training.mixed_precision"
EVERY = "training.gradient_checkpointing"
AUTO = "training.save_steps"


def decoded(field: str, text: str, *, is_plain: bool = True) -> object:
    return decode_value(all_fields()[field], Scalar(text, is_plain, HERE))


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        (NUMBER, "1e-4", 1e-4),
        (NUMBER, "3e-4", 3e-4),
        (NUMBER, "3E-4", 3e-4),
        (NUMBER, "+.5", 0.5),
        (NUMBER, "1.", 1.0),
        (NUMBER, "1_000.5", 1000.5),
        (NUMBER, "3", 3.0),
        (WHOLE, "5_000_000_000", 5_000_000_000),
        (WHOLE, "1e3", 1000),
        (WHOLE, "1.5e3", 1500),
        (WHOLE, "10.0", 10),
        (WHOLE, "+7", 7),
        (WHOLE, str(2**63 - 1), 2**63 - 1),
        ("optimizer.warmup_steps", "0", 0),
        (SWITCH, "yes", True),
        (SWITCH, "Off", False),
        (SWITCH, "TRUE", True),
        (TEXT, "on", "on"),
        (TEXT, "12", "12"),
        (TEXT, "3e-4", "3e-4"),
        (WORD, "no", "no"),
        (WORD, "null", None),
        (WORD, "", None),
        (EVERY, "true", True),
        (EVERY, "2", 2),
        (EVERY, "1", True),
        (EVERY, "no", False),
        (AUTO, "auto", "auto"),
        (AUTO, "500", 500),
        ("training.keep_last_k", "~", None),
    ],
)
def test_a_text_means_what_its_field_makes_of_it(field: str, text: str, value: object) -> None:
    found = decoded(field, text)
    assert found == value
    assert type(found) is type(value)


def test_text_in_quotes_is_taken_by_fields_that_take_text() -> None:
    assert decoded(TEXT, "null", is_plain=False) == "null"
    assert decoded(WORD, "no", is_plain=False) == "no"
    assert decoded(AUTO, "auto", is_plain=False) == "auto"


@pytest.mark.parametrize(
    ("field", "text", "complaint"),
    [
        (WHOLE, "2.5", "must be a whole number, is 2.5"),
        (WHOLE, "ten", "must be a whole number, is ten"),
        (WHOLE, "007", "must be a whole number"),
        (WHOLE, "0x10", "must be a whole number"),
        (WHOLE, "1_", "must be a whole number"),
        (WHOLE, "true", "must be a whole number"),
        (WHOLE, "null", "is null"),
        (WHOLE, "", "has no value"),
        (WHOLE, "1e17", "write all its digits"),
        (WHOLE, "1e400", "must be a whole number"),
        (WHOLE, str(2**63), "larger than"),
        (WHOLE, "9" * 5000, "must be a whole number"),
        (WHOLE, "0", "at least 1"),
        (WHOLE, "-3", "at least 1, is -3"),
        (NUMBER, "nan", "finite"),
        (NUMBER, ".inf", "finite"),
        (NUMBER, "-Infinity", "finite"),
        (NUMBER, "1e400", "too large"),
        (NUMBER, "e5", "must be a number"),
        (NUMBER, ".", "must be a number"),
        (NUMBER, "_1", "must be a number"),
        (NUMBER, "1,5", "must be a number"),
        (NUMBER, "٣", "must be a number"),
        (NUMBER, "0", "above 0"),
        ("model.dropout", "1", "below 1"),
        ("optimizer.min_lr_ratio", "1.1", "at most 1"),
        ("model.vocab_size", "16_777_217", "at most 16,777,216"),
        ("model.n_embd", "1_048_577", "at most 1,048,576"),
        ("model.n_layer", "10_001", "at most 10,000"),
        ("model.n_positions", "16_777_217", "at most 16,777,216"),
        ("model.intermediate_size", "16_777_217", "at most 16,777,216"),
        ("data.max_length", "16_777_217", "at least 2, at most 16,777,216, is 16777217"),
        ("data.num_workers", "1025", "at most 1,024"),
        ("training.per_device_batch_size", "1_048_577", "at most 1,048,576"),
        ("training.gradient_accumulation_steps", "1_048_577", "at most 1,048,576"),
        ("training.global_batch_size", "2_147_483_649", "at most 2,147,483,648"),
        (SWITCH, "1", "must be true or false, is 1"),
        (SWITCH, "y", "must be true or false"),
        (TEXT, "a\0b", "without NUL"),
        (TEXT, "~", "is null"),
        (WORD, "false", "must be bf16, fp16, no or null"),
        (AUTO, "never", "must be a whole number or auto"),
    ],
)
def test_a_text_that_does_not_fit_is_refused_with_what_was_expected(field: str, text: str, complaint: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        decoded(field, text)
    assert complaint in caught.value.complaint


@pytest.mark.parametrize(("field", "text"), [(WHOLE, "12"), (NUMBER, "3e-4"), (SWITCH, "yes"), (EVERY, "2")])
def test_a_quoted_number_or_switch_is_refused_with_its_right_form(field: str, text: str) -> None:
    with pytest.raises(InvalidValue, match="write it without quotes"):
        decoded(field, text, is_plain=False)


def test_the_nearest_word_is_offered() -> None:
    with pytest.raises(InvalidValue) as caught:
        decoded("optimizer.schedule", "cosin")
    assert caught.value.nearest == "cosine"
