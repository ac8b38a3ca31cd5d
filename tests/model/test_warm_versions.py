"""Hold plans of `warm` to what is then written, and old versions, first examples and roles to their rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import generate

from prefixbank import BankedModel, BankWarning, ChatRoles, ConfigError, Example, FewShotPrompt, PrefixBank, Replaced
from tests.model.tiny import CONFIGS, FROM_DISK, build_model, build_tokenizer, random_ids

WORDS = ("lamp", "zip", "kettle", "novel", "hotel", "soup")
SHOTS = FewShotPrompt(
    "Judge the review in one word, and do not explain your answer.",
    [Example(f"the {word} is lovely", "positive") for word in WORDS],
    name="mood/v1",
)
CHANGED = replace(SHOTS, examples=(*SHOTS.examples[:4], Example("the wick broke", "negative")))


def files_bytes(bank: PrefixBank) -> int:
    return sum(path.stat().st_size for path in bank.root.glob("shards/*/*"))


def keys(bank: PrefixBank) -> set[bytes]:
    return {chunk.key for chunk in bank.chunks()}


# --- plans


@pytest.mark.parametrize("boundaries", ["end", "examples"])
@pytest.mark.parametrize(
    "name", ["llama", "llama_sliding", "gemma3_text", "deepseek_v3", "qwen3_next", "falcon_h1", "mamba2", "llama4"]
)
def test_a_plan_is_what_is_then_done(name: str, boundaries: Any, small_bank: PrefixBank, tokenizer: Any) -> None:
    llm = small_bank.attach(build_model(name), tokenizer)
    for shots in (SHOTS, CHANGED, SHOTS.first(2), SHOTS):
        before = files_bytes(small_bank), keys(small_bank)
        plan = llm.plan_warm(shots, boundaries=boundaries)
        assert (files_bytes(small_bank), keys(small_bank)) == before
        warmed = llm.warm(shots, boundaries=boundaries)
        assert plan.written_bytes == warmed.written_bytes
        assert (plan.name, plan.n_tokens, plan.cached_tokens, plan.computed_tokens, plan.replaces) == (
            warmed.name,
            warmed.n_tokens,
            warmed.cached_tokens,
            warmed.computed_tokens,
            warmed.replaced,
        )
    assert warmed.written_bytes == 0


def test_states_each_so_many_chunks_are_in_the_plan(small_bank: PrefixBank, tokenizer: Any) -> None:
    llm = small_bank.attach(build_model("qwen3_next"), tokenizer, state_every_chunks=2)
    assert llm.plan_warm(SHOTS).written_bytes == llm.warm(SHOTS).written_bytes > 0


@pytest.mark.parametrize("start", [0, 40])
def test_quantised_prefixes_are_planned_as_they_are_stored(
    start: int, small_bank: PrefixBank, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS["llama"] | {"hidden_size": 128}  # groups of the quantisation must fit into its heads
    monkeypatch.setitem(CONFIGS, "wide", config)
    llm = small_bank.attach(build_model("wide"), tokenizer, kv_bits=8, kv_group_size=32, quantized_kv_start=start)
    for shots in (SHOTS.first(0), SHOTS, CHANGED):
        assert llm.plan_warm(shots).written_bytes == llm.warm(shots).written_bytes > 0


def test_plans_that_come_after_others_count_what_these_write_once(llm: BankedModel) -> None:
    todo = [SHOTS, CHANGED, SHOTS.first(3), replace(SHOTS, examples=(*SHOTS.examples, Example("a", "b")))]
    plans: list[Any] = []
    for shots in todo:
        plans.append(llm.plan_warm(shots, name="one", after=plans))
    assert plans[2].written_bytes == 0
    for shots, plan in zip(todo, plans, strict=True):
        warmed = llm.warm(shots)
        assert (plan.written_bytes, plan.cached_tokens) == (warmed.written_bytes, warmed.cached_tokens)


def test_seconds_are_unknown_until_something_was_measured_and_then_of_that_size(llm: BankedModel) -> None:
    plan = llm.plan_warm(SHOTS)
    assert (plan.compute_s, plan.seconds) == (None, None)
    llm.warm(SHOTS)
    llm._session.rates._lines[llm.namespace.id].compute = line = type(llm._session.rates._of(llm.namespace).compute)(
        min
    )
    line.add(100, 1.0 + 100 * 0.01)
    line.add(200, 1.0 + 200 * 0.01)
    other = llm.plan_warm(random_ids(150))
    assert other.seconds == other.compute_s == pytest.approx(1.0 + 150 * 0.01)  # the fixed part included
    assert other.load_s == 0.0
    partly = llm.plan_warm(CHANGED)
    assert partly.computed_tokens < partly.n_tokens
    assert partly.load_s is None
    assert partly.seconds == partly.compute_s == pytest.approx(1.0 + partly.computed_tokens * 0.01)
    nothing = llm.plan_warm(SHOTS)
    assert (nothing.compute_s, nothing.load_s, nothing.seconds, nothing.written_bytes) == (0.0, 0.0, 0.0, 0)


def test_a_read_only_bank_can_be_planned_for(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, chunk_tokens=16) as bank:
        bank.attach(llama, tokenizer).warm(SHOTS)
    with PrefixBank.open(bank_root, read_only=True) as bank:
        plan = bank.attach(llama, tokenizer).plan_warm(CHANGED, old="drop")
    assert plan.written_bytes > 0
    with PrefixBank.open(bank_root) as bank:
        assert bank.attach(llama, tokenizer).warm(CHANGED, old="drop").replaced == plan.replaces


# --- versions


def test_a_dropped_version_leaves_what_only_it_needed(llm: BankedModel, small_bank: PrefixBank) -> None:
    llm.warm(SHOTS, pin=True)
    old_keys = keys(small_bank)
    plan = llm.plan_warm(CHANGED, old="drop")
    warmed = llm.warm(CHANGED, old="drop")
    assert warmed.replaced == plan.replaces
    assert warmed.replaced is not None
    assert warmed.replaced.freed_bytes > 0
    (prefix,) = small_bank.prefixes()
    assert (prefix.name, prefix.source_digest, prefix.pinned) == ("mood/v1", CHANGED.source_digest, True)
    assert keys(small_bank) == {chunk.key for chunk in small_bank.chain(prefix)}
    assert keys(small_bank) & old_keys  # what both share was not stored again
    alone = llm.warm(CHANGED)
    assert (alone.written_bytes, alone.replaced) == (0, None)


def test_a_dropped_version_keeps_what_other_names_and_prompts_stand_on(
    llm: BankedModel, small_bank: PrefixBank
) -> None:
    llm.warm(SHOTS)
    llm.warm(SHOTS, name="the same")
    old_keys = keys(small_bank)
    assert llm.warm(CHANGED, old="drop").replaced == Replaced(SHOTS.source_digest, None, 0)
    assert old_keys <= keys(small_bank)
    (same,) = small_bank.prefixes("the same")
    assert llm.match(SHOTS.render("x")).n_tokens == same.n_tokens


@pytest.mark.parametrize("changed", [0, 1])
def test_a_dropped_version_of_another_model_stays(small_bank: PrefixBank, llm: BankedModel, changed: int) -> None:
    models = [llm, small_bank.attach(build_model(seed=5), llm.tokenizer)]
    n_tokens = [model.warm(SHOTS).n_tokens for model in models]
    replaced = models[changed].warm(CHANGED, old="drop").replaced
    assert replaced is not None
    assert replaced.freed_bytes > 0
    other = models[1 - changed]
    assert other.match(SHOTS.render("x")).n_tokens == n_tokens[1 - changed]
    assert models[changed].match(SHOTS.render("x")).n_tokens < n_tokens[changed]
    assert [prefix.source_digest for prefix in small_bank.prefixes("mood/v1")][1 - changed] == SHOTS.source_digest


@pytest.mark.parametrize(("first", "second"), [(SHOTS, SHOTS.first(3)), (SHOTS.first(3), SHOTS)])
def test_a_shorter_and_a_longer_version_drop_each_other(
    first: FewShotPrompt, second: FewShotPrompt, llm: BankedModel, small_bank: PrefixBank
) -> None:
    llm.warm(first, name="mood")
    plan = llm.plan_warm(second, name="mood", old="drop")
    warmed = llm.warm(second, name="mood", old="drop")
    assert (warmed.replaced, warmed.written_bytes) == (plan.replaces, plan.written_bytes)
    (prefix,) = small_bank.prefixes("mood")
    assert prefix.n_stored_tokens(small_bank.chain(prefix)) == warmed.n_tokens
    assert llm.match(second.render("x")).n_tokens == warmed.n_tokens
    assert keys(small_bank) == {chunk.key for chunk in small_bank.chain(prefix)}


@pytest.mark.parametrize("pin", [False, True])
def test_a_kept_version_has_a_name_of_its_own_and_its_pin(llm: BankedModel, small_bank: PrefixBank, pin: bool) -> None:
    llm.warm(SHOTS, pin=pin)
    plan = llm.plan_warm(CHANGED, old="keep")
    warmed = llm.warm(CHANGED, old="keep")
    name = f"mood/v1@{SHOTS.source_digest[:8]}"
    assert warmed.replaced == plan.replaces == Replaced(SHOTS.source_digest, name, 0)
    (old,) = small_bank.prefixes(name)
    (new,) = small_bank.prefixes("mood/v1")
    assert (old.source_digest, old.pinned) == (SHOTS.source_digest, pin)
    assert (new.source_digest, new.pinned) == (CHANGED.source_digest, pin)
    assert llm.match(SHOTS.render("x")).n_tokens == old.n_tokens
    llm.warm(SHOTS, old="keep")  # and back again
    assert {prefix.name for prefix in small_bank.prefixes()} == {
        "mood/v1",
        name,
        f"mood/v1@{CHANGED.source_digest[:8]}",
    }


def test_a_version_is_left_without_a_name_unless_told_otherwise(llm: BankedModel, small_bank: PrefixBank) -> None:
    llm.warm(SHOTS)
    n_old = llm.match(SHOTS.render("x")).n_tokens
    assert llm.warm(CHANGED).replaced == Replaced(SHOTS.source_digest)
    assert [prefix.source_digest for prefix in small_bank.prefixes()] == [CHANGED.source_digest]
    assert llm.match(SHOTS.render("x")).n_tokens == n_old


def test_a_text_of_the_same_name_is_no_version(llm: BankedModel) -> None:
    llm.warm("the lamp is lovely and the zip broke", name="mood/v1")
    assert llm.warm(SHOTS, old="drop").replaced is None


def test_an_evicted_version_is_not_kept(llm: BankedModel, small_bank: PrefixBank) -> None:
    llm.warm(SHOTS)
    small_bank.prune(max_bytes=0)
    assert llm.warm(CHANGED, old="keep").replaced == Replaced(SHOTS.source_digest)
    assert [prefix.name for prefix in small_bank.prefixes()] == ["mood/v1"]


@pytest.mark.parametrize("old", ["keep", "drop", "leave"])
def test_a_version_that_is_refused_leaves_the_old_one_as_it_was(
    bank_root: Path, llama: Any, tokenizer: Any, old: Any
) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16, max_bytes="150kB") as bank:
        llm = bank.attach(llama, tokenizer)
        llm.warm(SHOTS, pin=True)
        before = bank.prefixes()
        longer = replace(SHOTS, examples=SHOTS.examples * 12)
        with pytest.warns(BankWarning, match="not stored whole"):
            warmed = llm.warm(longer, old=old)
        assert warmed.stored_tokens < warmed.n_tokens
        assert warmed.replaced is None
        assert bank.prefixes() == before
        assert llm.match(SHOTS.render("x")).n_tokens == before[0].n_tokens


def test_wrong_options_are_refused_before_anything_is_computed(llm: BankedModel, small_bank: PrefixBank) -> None:
    with pytest.raises(ConfigError, match="old='lose': use leave, keep, drop"):
        llm.warm(SHOTS, old="lose")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="boundaries='all': use end or examples"):
        llm.warm(SHOTS, boundaries="all")  # type: ignore[arg-type]
    llm.warm(SHOTS, name="x" * 195)
    n_chunks = len(small_bank.chunks())
    for name, old in (("", "leave"), ("a\nb", "leave"), ("x" * 195, "keep")):
        with pytest.raises(ConfigError, match="can't be a prefix name"):
            llm.warm(replace(CHANGED, name="\n"), name=name, old=old)  # type: ignore[arg-type]
    assert len(small_bank.chunks()) == n_chunks


# --- the first examples, boundaries, roles, templates


def test_the_whole_prompt_serves_its_first_k_examples(llm: BankedModel) -> None:
    llm.warm(SHOTS)
    for k in (0, 2, 5):
        prompt = SHOTS.render("great soup", k=k)
        hit = llm.generate(prompt, max_tokens=3)
        assert hit.cached_tokens >= len(llm.shared_token_ids(SHOTS.first(k)))
        assert hit.text == generate(llm.model, llm.tokenizer, llm.encode(prompt), max_tokens=3)
    assert llm.plan_warm(SHOTS.first(2)).computed_tokens == 0


def test_a_prompt_that_says_so_has_boundaries_behind_each_example(small_bank: PrefixBank, tokenizer: Any) -> None:
    llm = small_bank.attach(build_model("mamba2"), tokenizer)
    llm.warm(replace(SHOTS, boundaries="examples"))
    n_shared = len(llm.shared_token_ids(SHOTS.first(2)))
    assert llm.match(SHOTS.render("great soup", k=2)).n_tokens == n_shared
    other = replace(SHOTS, instructions="Say what you think.", boundaries="examples")
    llm.warm(other, boundaries="end")  # what is asked for goes before
    assert llm.match(other.render("great soup", k=2)).n_tokens == 0


CHAT = replace(SHOTS, chat=True, roles=ChatRoles(instructions="user"))
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


@pytest.mark.parametrize("shots", [CHAT, replace(SHOTS, template="Q: {input}\nA: {output}\n\n")], ids=["chat", "text"])
def test_templates_and_roles_hit_like_others(shots: FewShotPrompt, small_bank: PrefixBank, llama: Any) -> None:
    """The chat template is one of those that know no system role and refuse two messages of one role in a row."""
    llm = small_bank.attach(llama, build_tokenizer(chat_template=NO_SYSTEM))
    n_shared = llm.warm(shots).n_tokens
    for k in (0, 3, None):
        rendered = shots.render("great soup", k=k)
        hit = llm.generate(rendered, max_tokens=3)
        assert hit.text == generate(llm.model, llm.tokenizer, llm.encode(rendered), max_tokens=3)
    assert hit.cached_tokens == n_shared > 50
