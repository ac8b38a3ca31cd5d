"""Hold variables to one value each, and braces of prompts to being left alone."""

from __future__ import annotations

import pytest

from prefixbank.errors import PromptError
from prefixbank.variables import Variables, old_version_name, split_variation, variation_name


def test_declared_variables_are_filled_in_and_other_braces_left() -> None:
    texts = Variables({"who": "Ann", "n": 3}, {}, "f")
    filled = texts.fill('{{who}} has {{ n }}: {"a": {"b": {{"c": 1}}}} {who} {{{who}}} {{}} {{n-1}}')
    assert filled == 'Ann has 3: {"a": {"b": {{"c": 1}}}} {who} {Ann} {{}} {{n-1}}'


def test_without_a_table_of_variables_nothing_is_filled_in() -> None:
    assert Variables(None, {}, "f").fill("{{who}}") == "{{who}}"


def test_values_are_not_looked_into_again() -> None:
    texts = Variables({"a": "{{b}}", "b": "x", "open": "{{"}, {}, "f")
    assert texts.fill("{{a}} {{open}}a}}") == "{{b}} {{a}}"


def test_given_values_go_before_defaults_and_only_real_changes_count() -> None:
    texts = Variables({"a": "1", "b": "2"}, {"a": 1, "b": "3", "c": "4"}, "f")
    assert texts.fill("{{a}}{{b}}{{c}}") == "134"
    assert texts.changed == {"b": "3", "c": "4"}
    texts.require_known()


def test_a_variable_without_value_is_named() -> None:
    with pytest.raises(PromptError, match=r"mood\.toml: the variable 'tone' has no value.*--var tone="):
        Variables({}, {"other": "x"}, "mood.toml").fill("{{tone}}")


def test_a_given_variable_that_nobody_knows_is_named() -> None:
    texts = Variables({"language": "German"}, {"langauge": "French"}, "mood.toml")
    texts.fill("{{language}}")
    with pytest.raises(PromptError, match=r"mood\.toml: unknown variable 'langauge' \(known: language\)"):
        texts.require_known()
    with pytest.raises(PromptError, match=r"mood\.toml has no table \[variables\]: 'language'"):
        Variables(None, {"language": "French"}, "mood.toml").require_known()


@pytest.mark.parametrize("name", ["", "a-b", "1a", "ä", "k", "a b"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(PromptError, match="can't be a variable"):
        Variables({name: "x"}, {}, "f")


@pytest.mark.parametrize("value", [True, None, ["x"], {"x": 1}], ids=str)
def test_a_value_that_is_no_text_or_number_is_refused(value: object) -> None:
    with pytest.raises(PromptError, match="f: the variable 'a' is a"):
        Variables({"a": value}, {}, "f")


def test_a_variation_is_told_by_its_name() -> None:
    assert variation_name("mood/v1", {}) == "mood/v1"
    assert variation_name("", {"k": 4}) == ""
    name = variation_name("mood/v1", {"tone": "dry", "language": "French"})
    assert name == "mood/v1@language=French,tone=dry"
    assert variation_name(name, {"k": 4}) == "mood/v1@language=French,tone=dry,k=4"
    assert split_variation("mood/v1@language=French,tone=dry,k=4") == (
        "mood/v1",
        {"language": "French", "tone": "dry", "k": "4"},
    )


@pytest.mark.parametrize("value", ["two words", "a,b", "a=b", "x@y", "x" * 25, "", "line\nbreak", "~"])
def test_values_that_do_not_fit_into_a_name_are_told_by_a_digest(value: str) -> None:
    name = variation_name("m", {"a": value})
    assert name != variation_name("m", {"a": value + "!"})
    assert len(name) == len("m@a=~12345678")
    assert split_variation(name) == ("m", None)


def test_an_old_version_is_told_by_its_digest() -> None:
    assert old_version_name("mood/v1", "0123456789abcdef") == "mood/v1@01234567"
    assert split_variation("mood/v1@01234567") == ("mood/v1", {"": "01234567"})
    assert split_variation("mood/v1@k=4@01234567") == ("mood/v1@k=4", {"": "01234567"})
    assert split_variation("mood/v1") == ("mood/v1", {})
    assert split_variation("ann@home") == ("ann", None)
