"""Bundles without some of a model's layers, which draft for the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streamspec.bundle.files import read_manifest
from streamspec.errors import ConfigError
from streamspec.export import export_bundle
from streamspec.export.layers.decoder_spec import describe
from streamspec.export.weights.skipped_layers import check_skippable, leave_out, price, read_skipped, search
from streamspec.runtime import Sampling, load
from tests.support.tiny_bundles import lettered_base
from tests.support.tiny_models import tiny_model

TEXTS = [[5, 9, 3, 17, 4, 30, 8, 8, 2], [11, 2, 40, 6]]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=torch.tensor(TEXTS[:1]), use_cache=False).logits
    return out


def silenced(model: Any, *layers: int) -> Any:
    """Makes the layers add nothing."""
    for layer in layers:
        for module in (model.model.layers[layer].self_attn.o_proj, model.model.layers[layer].mlp.down_proj):
            torch.nn.init.zeros_(module.weight)
    return model


def test_lists_of_layers_are_read() -> None:
    assert read_skipped("auto") is None
    assert read_skipped("7-9,3,8") == (3, 7, 8, 9)
    for wrong in ("", "a", "3,", "-1", "1..3"):
        with pytest.raises(ConfigError, match="auto, or layers such as"):
            read_skipped(wrong)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_are_left_out_and_put_back(family: str) -> None:
    model = tiny_model(family)
    whole, count = logits(model), model.config.num_hidden_layers
    put_back = leave_out(model, (0, 2))
    spec = describe(model)
    assert spec.layers == count - 2 and len(spec.windows) == count - 2
    assert not torch.equal(logits(model), whole)
    put_back()
    assert describe(model).layers == count and torch.equal(logits(model), whole)


def test_layers_that_add_nothing_change_nothing() -> None:
    model = silenced(tiny_model("llama", initializer_range=0.5), 1, 2)
    whole = logits(model)
    leave_out(model, (1, 2))
    torch.testing.assert_close(logits(model), whole)


def test_the_search_finds_the_layers_that_are_missed_least() -> None:
    model, said = silenced(tiny_model("llama", initializer_range=0.5), 0, 2), list[str]()
    found = search(model, TEXTS, said.append)
    assert found == (0, 2)
    assert [line.partition(":")[2].split()[0] for line in said[:2]] == ["100%", "100%"]
    assert model.config.num_hidden_layers == len(model.model.layers) == 4
    assert 0 < price(model, (0, 1, 2)) < price(model, (0, 2)) < price(model, ()) == 1


def test_layers_that_there_are_not_or_that_others_need_are_refused() -> None:
    model = tiny_model("llama")
    for wrong in ((4,), (0, 1, 2, 3), ()):
        with pytest.raises(ConfigError, match="0 to 3"):
            check_skippable(model, wrong)
    check_skippable(model, None)
    with pytest.raises(ConfigError, match="share nothing"):
        check_skippable(tiny_model("lfm2"), None)


def test_it_drafts_for_the_whole_model_and_answers_nothing_itself(tmp_path: Path) -> None:
    base = lettered_base(tmp_path / "base", eos=False)
    for name, skipped in (("whole", None), ("short", "auto"), ("given", "1-2")):
        export_bundle(base, None, tmp_path / name, "int8", progress=lambda line: None, skip_layers=skipped)
    assert read_manifest(tmp_path / "whole").model.skipped_layers == ()
    assert read_manifest(tmp_path / "given").model.skipped_layers == (1, 2)
    short = read_manifest(tmp_path / "short").model
    assert short.skipped_layers and short.layers == 4 - len(short.skipped_layers)
    with pytest.raises(ConfigError, match="a whole model, for which it drafts"):
        load(tmp_path / "given")
    options: dict[str, Any] = {"threads": 1, "tree": 8, "ngram": False, "recycling": False}
    session, drafted = load(tmp_path / "whole", draft=tmp_path / "short", **options), 0
    for sampling in (Sampling(), Sampling(1.0, seed=5)):
        for prompt in ("hello", "a b c"):
            plain, found = (
                session.generate(prompt, max_new_tokens=30, sampling=sampling, speculate=speculate)
                for speculate in (False, True)
            )
            assert found.text == plain.text
            drafted += found.stats.sources["drafter"].drafted
    assert drafted


def test_a_drafter_beside_it_is_refused(tmp_path: Path) -> None:
    from tests.support.tiny_bundles import tiny_adapter, tiny_base

    base = tiny_base(tmp_path / "base")
    adapter = tiny_adapter(tmp_path / "adapter", base)
    with pytest.raises(ConfigError, match="beside a drafter"):
        export_bundle(base, adapter, tmp_path / "out", skip_layers="1", progress=lambda line: None)
