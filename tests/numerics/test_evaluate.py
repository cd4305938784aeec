"""`evaluate` and `export` as a user calls them, on a folder of a tiny hybrid target with its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipe.decode.cache import open_session
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.evaluate import evaluate, measure
from recipe.decode.metrics import explain_mismatch
from recipe.decode.plain import plain_generate
from recipe.decode.prompts import Prompt, encode_prompts
from recipe.decode.sampling import Sampler
from recipe.decode.speculative import SpeculativeDecoder
from recipe.errors import ConfigError
from recipe.run.cli import main
from recipe.training.export import export_hf
from recipe.training.integrity import FORMAT, seal, sum_of_file
from tests.numerics.decode_models import BLOCK, Oracle, drafter_parts, plain, prompts, tiny_target

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
ROWS = [
    {"messages": [{"role": "user", "content": f"count to {n}"}], "domain": ("text", "maths")[n % 2]} for n in range(5)
]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    tiny_target("qwen3_5").save_pretrained(folder)
    letters = {chr(32 + i): i for i in range(95)} | {"\n": 95, "?": 31, "<unk>": 96, "<end>": 97}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def export_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, weights = drafter_parts(depth=5)
    return export_hf(weights, config, tmp_path_factory.mktemp("drafter") / "export", "float32")


def call(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_cli_measures_an_export(
    target_dir: Path, export_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    out = tmp_path / "new" / "result.json"
    code = call("evaluate", export_dir, "--target", target_dir, "--prompts", file, "--num-prompts", 4,
                "--max-new-tokens", 9, "--json", out)  # fmt: skip
    assert code == 0
    result, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert result["identical"] is True and result["mismatches"] == [] and result["prompts"] == 4
    assert 1.0 <= result["tau"] < 2 and result["tau_ci"][0] <= result["tau"] <= result["tau_ci"][1]
    assert len(result["accept_rate"]) == BLOCK - 1 and result["seconds"] > 0 and result["speedup"] > 0
    assert result["settings"]["rendered_prompt"] == "<user>count to 0\n<assistant>"
    assert {name: domain["prompts"] for name, domain in result["domains"].items()} == {"maths": 2, "text": 2}
    assert result["state_replays"] > 0 and 0 < result["target_forwards_per_token"] <= 1.0
    assert result["tokens"] == 4 * 9 and "identical to plain" in shown and "bonus" in shown


def test_run_directory_brings_export_target_and_prompts(target_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    (run / "data" / "heldout_prompts.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    settings = {"dflash": {"target": {"path": str(target_dir)}, "data": {"path": str(run / "data")}}}
    (run / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no export yet"):
        evaluate(run)
    for step, seed in ((9, 1), (10, 2)):
        config, weights = drafter_parts(seed, depth=5)
        export_hf(weights, config, run / "export" / f"step_{step:08d}", "float32")
    evaluation = evaluate(run, max_new_tokens=4, temperature=0.8)
    assert evaluation.settings["export"].endswith("step_00000010")
    assert evaluation.prompts == 1 and evaluation.identical and evaluation.tau_ci is None


def test_export_verb_reads_a_checkpoint(target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoint_of(tmp_path / "run", target_dir)
    assert call("export", tmp_path / "run") == 0
    shown = capsys.readouterr().out
    assert f'"num_speculative_tokens": {BLOCK - 1}' in shown and f"--speculative-num-draft-tokens {BLOCK}" in shown
    assert call("export", tmp_path / "run", "--format", "speculators", "--dtype", "bfloat16") == 0
    for name in ("step_00000007", "step_00000007-speculators"):
        result = evaluate(tmp_path / "run" / "export" / name, target_dir, ROWS[:1], max_new_tokens=3)
        assert result.identical
    assert call("export", tmp_path / "run", "--step", 8) == 2
    assert call("export", tmp_path) == 2


@pytest.mark.parametrize("name", ["run", "target", "file", "below a file"])
def test_export_replaces_nothing_but_an_export(
    target_dir: Path, export_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    """A run and a target have a config.json too; they were deleted once."""
    (tmp_path / "file").write_text("x")
    run = checkpoint_of(tmp_path / "run", target_dir)
    shutil.copytree(target_dir, tmp_path / "target")
    output = tmp_path / "file" / "below" if name == "below a file" else tmp_path / name
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert call("export", run, "--output", output) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "--output" in said and "Fix:" in said
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    again = shutil.copytree(export_dir, tmp_path / "again")
    assert call("export", run, "--output", again) == 0, "an export may be replaced"


@pytest.mark.parametrize("damage", ["cut", "gone", "garbage"])
def test_a_damaged_checkpoint_is_one_message(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, damage: str
) -> None:
    """Also where its own list of sizes says that all is well."""
    run = checkpoint_of(tmp_path / "run", target_dir, damage)
    assert call("export", run) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "Fix:" in said and "--resume" not in said and not (run / "export").exists()


def checkpoint_of(run: Path, target: Path, damage: str | None = None) -> Path:
    """A run with one checkpoint of step 7."""
    from safetensors.torch import save_file

    config, weights = drafter_parts(depth=5)
    checkpoint = run / "checkpoints" / "step_00000007"
    checkpoint.mkdir(parents=True)
    save_file(weights, checkpoint / "weights.safetensors")
    (checkpoint / "config.json").write_text("{x" if damage == "garbage" else json.dumps(config.to_dict()))
    if damage == "cut":
        _cut(checkpoint / "weights.safetensors")
    elif damage == "gone":
        (checkpoint / "weights.safetensors").unlink()
    files = {path.name: [path.stat().st_size, sum_of_file(path)] for path in checkpoint.iterdir()}
    state = {"format": FORMAT, "step": 7, "identity": {}, "files": files}
    (checkpoint / "state.json").write_text(json.dumps(seal(state)))
    (run / "config.json").write_text(json.dumps({"dflash": {"target": {"path": str(target)}}}))
    return run


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--num-prompts", "0"], "--num-prompts"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--max-new-tokens", "9999"], "--max-new-tokens"),
        (["--batch-size", "0"], "--batch-size"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--device", "foo"], "--device"),
        (["--device", "meta"], "--device"),
        (["--device", "cuda:99"], "--device"),
        (["--json", "/proc/nowhere/out.json"], "--json"),
        (["--json", "/tmp"], "--json"),
        (["--template-kwargs", "[]"], "--template-kwargs"),
        (["--prompts", "/nowhere.jsonl"], "--prompts"),
        (["--target", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_end_with_2(
    target_dir: Path, export_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], named: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n")
    assert call("evaluate", export_dir, "--target", target_dir, "--prompts", file, *more) == 2
    text = capsys.readouterr().err
    assert named in text and "Traceback" not in text and "Fix:" in text


def test_a_drafter_of_another_target_is_refused(target_dir: Path, tmp_path: Path) -> None:
    config, weights = drafter_parts(depth=9)
    folder = export_hf(weights, config, tmp_path / "other", "float32")
    with pytest.raises(ConfigError, match="num_target_layers"):
        evaluate(folder, target_dir, ROWS)
    with pytest.raises(ConfigError, match="--target"):
        evaluate(folder, None, ROWS)
    with pytest.raises(ConfigError, match="neither a run directory nor an export"):
        evaluate(tmp_path, target_dir, ROWS)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _set(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _strip(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors[min(tensors)]
    save_file(tensors, path, {"format": "pt"})


DAMAGE = {
    "export cut": ("export", "model.safetensors", _cut),
    "export without weights": ("export", "model.safetensors", Path.unlink),
    "export garbage": ("export", "config.json", lambda path: path.write_text("{x")),
    "export size": ("export", "config.json", lambda path: _set(path, hidden_size="abc")),
    "export heads": ("export", "config.json", lambda path: _set(path, num_attention_heads=0)),
    "export lists": ("export", "config.json", lambda path: _set(path, dflash_config=[1])),
    "export block": ("export", "config.json", lambda path: _set(path, dflash_config=DFLASH_CONFIG | {"block_size": 0})),
    "target cut": ("target", "model.safetensors", _cut),
    "target without a tensor": ("target", "model.safetensors", _strip),
    "target of other shapes": ("target", "config.json", lambda path: _set(path, intermediate_size=96)),
    "target of another vocabulary": ("target", "config.json", lambda path: _set(path, vocab_size=130)),
    "target's tokenizer": ("target", "tokenizer.json", lambda path: path.write_text("{x")),
}
DFLASH_CONFIG = {"mask_token_id": 119, "target_layer_ids": [0, 1, 2]}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_files_are_one_message(
    target_dir: Path, export_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, what: str
) -> None:
    place, name, damage = DAMAGE[what]
    folders = {"target": tmp_path / "target", "export": tmp_path / "export"}
    for one, source in zip(folders, (target_dir, export_dir), strict=True):
        shutil.copytree(source, folders[one])
    damage(folders[place] / name)
    (tmp_path / "p.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    out = tmp_path / "out.json"
    more = ("--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 2, "--json", out)
    assert call("evaluate", folders["export"], "--target", folders["target"], *more) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "Fix:" in said and "Traceback" not in said and not out.exists()


def test_prompts_are_rendered_for_the_answer(target_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    one, two, three = encode_prompts([chat, {"prompt": "raw"}, {"input_ids": [40, 41], "id": "x"}], tokenizer)
    assert three.ids.tolist() == [40, 41] and len(three.text) >= 2
    assert one.text == "<user>hi\n<assistant>" and one.domain == "all" and two.text == "raw"
    assert len(one.ids) == len(one.text)
    wrong = [{"messages": value} for value in ("hi", {"role": "user"}, ["hi"], [{"content": "hi"}], 3)]
    for row in ({"text": "x"}, {"prompt": ""}, {}, {"prompt": 5}, {"input_ids": [999]}, {"input_ids": ["a"]}, *wrong):
        with pytest.raises(ConfigError, match="row 2"):
            encode_prompts([{"prompt": "x"}, row], tokenizer)
    with pytest.raises(ConfigError, match="no prompts"):
        encode_prompts([], tokenizer)


def test_perfect_and_broken_decoding_are_told_apart() -> None:
    """A perfect drafter is worth block_size; a session that forgets to roll back is reported as no tie."""
    target = tiny_target("qwen3_5")
    listed = [Prompt(ids, "", "all") for ids in prompts(3)]
    good = measure(SpeculativeDecoder(target, Oracle(target)), listed, 1 + 3 * BLOCK)
    assert good.tau == BLOCK and good.identical and good.accept_rate == [1.0] * (BLOCK - 1) and good.state_replays == 0

    class Leaky(SpeculativeDecoder):
        def generate(self, *args, **kwargs):
            from recipe.decode.cache import TargetSession

            real = TargetSession._replay_linear
            TargetSession._replay_linear = lambda self, rows: None  # the states keep the refused tokens
            try:
                return super().generate(*args, **kwargs)
            finally:
                TargetSession._replay_linear = real

    drafter = IncrementalDrafter(*drafter_parts(depth=5))
    embed, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    bad = measure(Leaky(target, drafter, embed, head), listed, 15)
    assert not bad.identical and bad.identical_prompts < 3
    assert all(not mismatch.numeric_tie for mismatch in bad.mismatches), "a fault must not pass for rounding"
    assert all(mismatch.gap > mismatch.noise for mismatch in bad.mismatches)


def test_a_numeric_tie_is_named() -> None:
    target = tiny_target("llama")
    prompt = prompts(1)[0]
    answer = plain(target, prompt, 6)
    twin = (answer[3] + 1) % target.config.vocab_size
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[answer[3]]
    mismatch = explain_mismatch(target, 0, prompt, answer, [*answer[:3], twin, 0, 0])
    assert mismatch and mismatch.position == 3 and mismatch.gap == 0 and mismatch.numeric_tie
    assert explain_mismatch(target, 0, prompt, answer, answer) is None
    short = explain_mismatch(target, 0, prompt, answer, answer[:2])
    assert short and short.position == 2 and short.speculative is None and not short.numeric_tie


def test_rounding_is_no_fault_at_any_temperature() -> None:
    """bfloat16: what rounding parts is named a tie, with a sampler too; another token than the best few is a fault."""
    target = tiny_target("llama").to(torch.bfloat16)
    found = 0
    for index, prompt in enumerate(prompts(4)):
        for temperature in (0.0, 0.8):
            sampler = Sampler(temperature, index)
            answer = plain_generate(target, prompt, 6, temperature, seed=index).tokens
            with open_session(target, []) as session:
                logits = session.prefill(torch.cat([prompt, torch.tensor(answer[:3])])).logits
            order = sampler.scores(logits, len(prompt) + 3)[0].float().argsort(descending=True).tolist()
            last = next(token for token in reversed(order) if token != answer[3])
            fault = explain_mismatch(target, index, prompt, answer, [*answer[:3], last], sampler=sampler)
            assert fault and fault.gap is not None and fault.noise and not fault.numeric_tie
            found += fault.noise < 8 * torch.finfo(torch.bfloat16).eps * float(logits.abs().max()) / 2
    assert found >= 6, "the noise is measured: mostly far below what was once allowed without looking"


def test_a_mismatch_of_samples_by_rounding_is_a_tie() -> None:
    """With a sampler the smallest step between two tokens' scores is found by search, and is a tie; a large one not."""
    target = tiny_target("llama").to(torch.bfloat16)
    ties = faults = 0
    for index, prompt in enumerate(prompts(12)):
        sampler = Sampler(0.8, index)
        answer = plain_generate(target, prompt, 1, 0.8, seed=index).tokens
        with open_session(target, []) as session:
            scores = sampler.scores(session.prefill(prompt).logits, len(prompt))[0]
        assert int(scores.argmax()) == answer[0]
        second = int(scores.topk(2).indices[1])
        mismatch = explain_mismatch(target, index, prompt, answer, [second], sampler=sampler)
        assert mismatch is not None and mismatch.noise is not None
        assert mismatch.gap == pytest.approx(float(scores[answer[0]] - scores[second]), abs=1e-6)
        assert mismatch.numeric_tie == (mismatch.gap <= mismatch.noise)
        ties, faults = ties + mismatch.numeric_tie, faults + (not mismatch.numeric_tie)
    assert faults and ties + faults == 12


def test_damaged_weights_are_named_everywhere(target_dir: Path, export_dir: Path, tmp_path: Path) -> None:
    """evaluate and regenerate read a target through one door: the message names the file that is cut."""
    from recipe.model_files.whole_model import load_whole_model
    from recipe.prepare.local_engine import LocalEngine

    copy = Path(shutil.copytree(target_dir, tmp_path / "cut"))
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    doors: list[tuple[str, Callable[[], object]]] = [
        ("--target", lambda: evaluate(export_dir, copy, ROWS, max_new_tokens=2)),
        ("--model", lambda: LocalEngine(str(copy), "cpu")),
        ("dflash.target.path", lambda: load_whole_model(copy, torch.float32, "dflash.target.path")),
    ]
    for field, door in doors:
        with pytest.raises(ConfigError, match=rf"{field}.*model\.safetensors cannot be read"):
            door()


def test_batches_are_refused_before_weights_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    from recipe.decode import evaluate as module

    folder = tmp_path / "sliding"
    AutoConfig.for_model(
        "gemma3_text", vocab_size=98, hidden_size=32, num_hidden_layers=5, intermediate_size=32, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=16, max_position_embeddings=64,
    ).save_pretrained(folder)  # fmt: skip
    with pytest.raises(ConfigError, match=r"--batch-size.*not decoded in batches"):
        module.check_batches(module._model_config(folder))
    export = export_hf(*drafter_parts(depth=5)[::-1], tmp_path / "export", "float32")
    monkeypatch.setattr(module, "check_fit", lambda *_: None)
    with pytest.raises(ConfigError, match="--batch-size"):  # there is no weight file at all
        evaluate(export, folder, ROWS, batch_size=2)
