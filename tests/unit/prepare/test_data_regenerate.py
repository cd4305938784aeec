"""regenerate against a real HTTP server, with faults, kill -9 and resume; and with a real small model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recipe.data.rows import Rows
from recipe.errors import ConfigError, RunError
from recipe.prepare import regenerate as verb
from recipe.prepare.answer import Sampling
from recipe.prepare.chat_mask import ChatMask
from recipe.prepare.local_engine import LocalEngine
from recipe.prepare.prepare import prepare
from recipe.prepare.served import ServerEngine
from recipe.run.cli import main
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from tests.openai_server import ModelServer
from tests.tiny import make_target
from tests.unit.prepare.chat_templates import USERS, make_tokenizer, save_tokenizer

HAS_OPENAI = importlib.util.find_spec("openai") is not None


class Server(ThreadingHTTPServer):
    """Answers "re: <last user text>"; fails now and then, as told."""

    daemon_threads = True
    faults: tuple[int, ...] = ()
    delay_s = 0.0
    broken = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, Any]] = []
        self.tries: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def _send(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = request["messages"][-1]["content"]
        with self.server.lock:
            self.server.seen.append(request)
            self.server.tries[asked] += 1
            attempt = self.server.tries[asked]
        time.sleep(self.server.delay_s)
        if "forbidden" in asked or self.server.broken:
            return self._send(400, {"error": "too long"})
        if attempt <= len(self.server.faults):
            fault = self.server.faults[attempt - 1]
            if fault == 0:
                return self.connection.close()  # cut in the middle
            return self._send(fault, {"error": "busy"})
        message = {
            "content": f"re: {asked}",
            "reasoning_content": "hm" if request.get("chat_template_kwargs") else None,
        }
        choice = {"message": message, "finish_reason": "length" if "endless" in asked else "stop", "token_ids": [1, 2]}
        self._send(200, {"choices": [choice], "usage": {"completion_tokens": 2}})


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def questions(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": t}]}) + "\n" for t in texts))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def go(server: Server, source: Path, out: Path, sampling: Sampling | None = None, **more: Any) -> verb.Outcome:
    def make() -> ServerEngine:
        return ServerEngine(server.url, "tiny", retries=4, backoff_s=0.01)

    settings = {"engine": "server", "model": "tiny"}
    return verb.regenerate([source], out, make, settings, sampling or Sampling(), concurrency=4, quiet=True, **more)


def test_faults_are_retried_and_refusals_left_out(server: Server, tmp_path: Path) -> None:
    server.faults = (503, 0, 429)
    source = questions(tmp_path / "q.jsonl", [f"q{i}" for i in range(20)] + ["forbidden", "endless"])
    out = go(server, source, tmp_path / "a.jsonl")
    assert (out.written, out.failed, out.truncated) == (21, 1, 1)
    rows = {row["id"]: row for row in lines(tmp_path / "a.jsonl")}
    assert len(rows) == 21 and rows["q.jsonl:3"]["messages"][-1] == {"role": "assistant", "content": "re: q2"}
    assert rows["q.jsonl:3"]["answer_token_ids"] == [[1, 2]] and rows["q.jsonl:22"]["messages"][-1]["truncated"] is True
    assert server.tries["q0"] == 4 and server.tries["forbidden"] == 1
    again = go(server, source, tmp_path / "a.jsonl")
    assert (again.resumed, again.written, again.failed) == (21, 0, 1)


def test_every_turn_is_answered_on_its_own_history(server: Server, tmp_path: Path) -> None:
    said = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "a"), ("assistant", "old"), ("user", "b"))]
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"id": 7, "messages": [*said, {"role": "assistant", "content": "old"}]})
    )
    go(server, tmp_path / "q.jsonl", tmp_path / "a.jsonl", Sampling(50, 0.7, thinking=True))
    (row,) = lines(tmp_path / "a.jsonl")
    assert row["id"] == "7" and [m["content"] for m in row["messages"]] == ["s", "a", "re: a", "b", "re: b"]
    assert row["messages"][2]["reasoning_content"] == "hm"
    request = server.seen[-1]
    assert request["chat_template_kwargs"] == {"enable_thinking": True} and request["temperature"] == 0.7
    assert request["max_tokens"] == 50 and [m["content"] for m in request["messages"]] == ["s", "a", "re: a", "b"]


def test_killed_and_resumed_loses_and_doubles_nothing(server: Server, tmp_path: Path) -> None:
    server.delay_s = 0.02
    source, out = questions(tmp_path / "q.jsonl", [f"q{i % 150}" for i in range(300)]), tmp_path / "a.jsonl"
    words = [
        "--input",
        str(source),
        "--output",
        str(out),
        "--model",
        "tiny",
        "--base-url",
        server.url,
        "--concurrency",
        "4",
    ]
    code = (
        "import argparse, sys; from recipe.prepare import regenerate as v; p = argparse.ArgumentParser();"
        "v.add_arguments(p); sys.exit(v.run(p.parse_args(sys.argv[1:])))"
    )
    root = Path(verb.__file__).parents[2]
    for _ in range(2):
        before = len(out.read_text().splitlines()) if out.exists() else 0
        job = subprocess.Popen([sys.executable, "-c", code, *words], cwd=root, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while (len(out.read_text().splitlines()) if out.exists() else 0) < before + 20 and time.monotonic() < deadline:
            assert job.poll() is None
            time.sleep(0.01)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    with out.open("a") as torn:
        torn.write('{"id": "q.jsonl:299", "mess')
    assert 40 <= len(lines_whole(out)) < 300
    assert subprocess.run([sys.executable, "-c", code, *words], cwd=root, stdout=subprocess.DEVNULL).returncode == 0
    rows = lines(out)
    assert len(rows) == 300 == len({row["id"] for row in rows})


def lines_whole(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_mistakes_are_named(server: Server, tmp_path: Path) -> None:
    source = questions(tmp_path / "q.jsonl", ["a"])
    with pytest.raises(ConfigError, match="does not answer"):
        ServerEngine("http://127.0.0.1:9/v1", "tiny").check()
    with pytest.raises(ConfigError, match="served: tiny"):
        ServerEngine(server.url, "other").check()
    go(server, source, tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"temperature 0\.0, now 1\.0"):
        go(server, source, tmp_path / "a.jsonl", Sampling(temperature=1.0))
    (tmp_path / "mine.jsonl").write_text("precious\n")
    with pytest.raises(ConfigError, match="not begun by"):
        go(server, source, tmp_path / "mine.jsonl")
    server.broken = True
    with pytest.raises(RunError, match="one after another"):
        go(server, questions(tmp_path / "r.jsonl", ["x"] * 50), tmp_path / "b.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = save_tokenizer(tmp_path_factory.mktemp("model"), "chatml")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=400, num_key_value_heads=2, **shape)).save_pretrained(folder)
    return folder


def test_local_answers_equal_plain_generation(model: Path, tmp_path: Path) -> None:
    """Oracle: one prompt at a time through the model, argmax by argmax, without cache, padding or generate()."""
    import torch

    texts = [f"question {'x' * i}" for i in range(7)]
    out = tmp_path / "a.jsonl"
    engine = LocalEngine(str(model), batch_size=3)
    done = verb.regenerate([questions(tmp_path / "q.jsonl", texts)], out, lambda: engine, {}, Sampling(12), quiet=True)
    assert done.written == 7
    by_id = {row["id"]: row for row in lines(out)}
    for i, text in enumerate(texts):
        ids = engine.encode([{"role": "user", "content": text}], None, Sampling())
        made: list[int] = []
        while len(made) < 12 and not (made and made[-1] in engine.stops):
            with torch.inference_mode():
                logits = engine.model(input_ids=torch.tensor([ids + made]), use_cache=False).logits
            made.append(int(logits[0, -1].argmax()))
        row = by_id[f"q.jsonl:{i + 1}"]
        assert row["answer_token_ids"] == [made]
        assert row["messages"][-1].get("truncated", False) is (made[-1] not in engine.stops)


def test_a_prompt_that_the_template_cannot_show_whole_is_counted(model: Path, tmp_path: Path) -> None:
    chats = [
        [("system", "Be brief"), ("user", "a")],
        [("user", "b")],
        [("user", "c"), ("assistant", ""), ("tool", "9")],
    ]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = LocalEngine(str(model))
    engine.turns = ChatMask(make_tokenizer(template=USERS)).turns
    out = tmp_path / "a.jsonl"
    done = verb.regenerate([tmp_path / "q.jsonl"], out, lambda: engine, {}, Sampling(3), quiet=True)
    assert done.written == 1 and done.dropped == {"turn_not_rendered": 2} and lines(out)[0]["id"] == "q.jsonl:2"


def test_company_does_not_change_what_is_drawn(model: Path) -> None:
    """After a resume the batches are others. Oracle: the same prompts alone; and many draws have the model's odds."""
    import torch

    engine, sampling = LocalEngine(str(model), batch_size=4), Sampling(8, temperature=1.0)
    prompts = [engine.encode([{"role": "user", "content": text}], None, Sampling()) for text in ("a", "bb c", "d", "x")]
    together = [answer.token_ids for answer in engine.generate(prompts, sampling, [5, 6, 7, 8])]
    alone = [
        engine.generate([ids], sampling, [seed])[0].token_ids for ids, seed in zip(prompts, (5, 6, 7, 8), strict=True)
    ]
    assert together == alone
    draws = engine.generate(prompts[:1] * 4000, Sampling(1, temperature=0.7), range(4000))
    counts = torch.bincount(torch.tensor([answer.token_ids[0] for answer in draws]), minlength=400)
    with torch.inference_mode():
        logits = engine.model(input_ids=torch.tensor(prompts[:1])).logits[0, -1].double()
    expected = 4000 * torch.softmax(logits / 0.7, 0)
    kept = expected > 5
    chi = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert chi < int(kept.sum()) + 5 * (2 * int(kept.sum())) ** 0.5, chi


def test_batches_without_padding_hold_equal_lengths(model: Path) -> None:
    engine = LocalEngine(str(model), batch_size=2)
    prompts = [[1] * n for n in (3, 5, 3, 3, 5)]
    assert not engine.equal_lengths and [len(b) for b in engine.batches(prompts)] == [2, 2, 1]
    engine.equal_lengths = True
    batches = list(engine.batches(prompts))
    assert sorted(i for b in batches for i in b) == [0, 1, 2, 3, 4]
    assert all(len({len(prompts[i]) for i in b}) == 1 for b in batches) and len(batches) == 3


def test_a_hybrid_answers_padded_as_alone(tmp_path: Path) -> None:
    """Gated DeltaNet carries a state over the padding, its convolution a window: neither may notice."""
    use_torch_kernels_on_cpu()  # saves the import of fla's GPU kernels
    engine = LocalEngine(str(make_target(tmp_path)), batch_size=4)
    prompts = [[(7 * i + 3 * j) % 180 + 6 for j in range(n)] for i, n in enumerate((3, 70, 1, 30))]
    assert not engine.equal_lengths and [len(b) for b in engine.batches(prompts)] == [4]
    together = [a.token_ids for a in engine.generate(prompts, Sampling(10), 0)]
    assert together == [engine.generate([p], Sampling(10), 0)[0].token_ids for p in prompts]
    assert len({tuple(t or ()) for t in together}) > 1


def test_a_target_that_reads_padding_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    folder = str(make_target(tmp_path))
    monkeypatch.setattr(qwen, "apply_mask_to_padding_states", lambda hidden, mask: hidden)
    assert LocalEngine(folder).equal_lengths


CLIENTS = ["standard library", pytest.param("openai", marks=pytest.mark.skipif(not HAS_OPENAI, reason="no openai"))]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_real_model_behind_http_answers_as_it_does_here(
    client: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client != "openai":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    engine = LocalEngine(str(model), batch_size=3)
    source = tmp_path / "q.jsonl"
    said = [[f"say {i}", "old", f"and then {i}?"] for i in range(6)]
    roles = ("user", "assistant", "user")
    chats = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, m, strict=True)]} for m in said]
    source.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    verb.regenerate([source], tmp_path / "local.jsonl", lambda: engine, {}, Sampling(8), quiet=True)
    for strict in (False, True):
        with ModelServer(engine, faults=0.3, strict=strict) as served:
            threading.Thread(target=served.serve_forever, daemon=True).start()

            def make(url: str = served.url) -> ServerEngine:
                return ServerEngine(url, engine.name, retries=12, backoff_s=0.001, timeout_s=0.5)

            out = tmp_path / f"{strict}.jsonl"
            done = verb.regenerate([source], out, make, {}, Sampling(8), concurrency=3, quiet=True)
            served.shutdown()
        assert (done.written, done.failed) == (6, 0) and served.faulty
        expected = {row["id"]: row for row in lines(tmp_path / "local.jsonl")}
        rows = {row["id"]: row for row in lines(out)}
        assert {k: r["messages"] for k, r in rows.items()} == {k: r["messages"] for k, r in expected.items()}
        if not strict:
            assert {k: r["answer_token_ids"] for k, r in rows.items()} == {
                k: r["answer_token_ids"] for k, r in expected.items()
            }
        assert all("answer_token_ids" in row for row in rows.values()) is not strict


def test_a_strict_server_is_asked_without_ids_even_without_retries(model: Path) -> None:
    with ModelServer(LocalEngine(str(model)), strict=True) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        engine = ServerEngine(served.url, "model", retries=0)
        assert engine.answer([{"role": "user", "content": "a"}], None, Sampling(4), 0).token_ids is None
        served.shutdown()


def test_an_output_is_continued_only_with_its_own_input(server: Server, tmp_path: Path) -> None:
    source = questions(tmp_path / "q.jsonl", ["a", "b"])
    go(server, source, tmp_path / "a.jsonl")
    questions(source, ["new", "a", "b"])  # every row has moved: ids by place would be taken for answered
    with pytest.raises(ConfigError, match="other --input"):
        go(server, source, tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="one of the --input"):
        go(server, source, source, overwrite=True)
    assert len(source.read_text().splitlines()) == 3


def test_overwriting_begins_with_the_first_answer(server: Server, tmp_path: Path) -> None:
    """A mistake that is found before it costs nothing of what was there."""
    asked, out = questions(tmp_path / "q.jsonl", ["a", "b"]), tmp_path / "a.jsonl"
    common = ["--input", str(asked), "--output", str(out), "--model", "tiny"]
    assert main(["regenerate", *common, "--base-url", server.url]) == 0
    before = out.read_bytes()
    assert main(["regenerate", *common, "--base-url", "http://127.0.0.1:9/v1", "--retries", "0", "--overwrite"]) != 0
    assert out.read_bytes() == before and before
    assert main(["regenerate", *common, "--base-url", server.url, "--temperature", "0.5", "--overwrite"]) == 0
    assert len(lines(out)) == 2
    assert main(["regenerate", *common, "--base-url", server.url, "--temperature", "0.5"]) == 0


def test_ids_stay_apart_whatever_they_look_like(tmp_path: Path) -> None:
    names = ["a", "a", "a#2", "a", "a#2", "b"]
    rows = [{"id": name, "messages": [{"role": "user", "content": "q"}]} for name in names]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = [prompt.id for prompt in verb.read_prompts([tmp_path / "q.jsonl"], Counter())]
    assert len(set(ids)) == len(names) and ids[0] == "a" and ids[-1] == "b"


def test_damage_inside_an_output_is_named_and_nothing_cut(server: Server, tmp_path: Path) -> None:
    source, out = questions(tmp_path / "q.jsonl", ["a", "b", "c"]), tmp_path / "a.jsonl"
    go(server, source, out)
    damaged = out.read_text().replace('{"id"', '{"di"', 1)
    out.write_text(damaged)
    with pytest.raises(ConfigError, match="no line that `regenerate` wrote") as error:
        go(server, source, out)
    assert str(error.value.value).endswith("a.jsonl:1") and out.read_text() == damaged


def test_what_was_cut_is_not_taught_as_an_end(server: Server, model: Path, tmp_path: Path) -> None:
    go(server, questions(tmp_path / "q.jsonl", ["endless", "four"]), tmp_path / "a.jsonl")
    prepare([tmp_path / "a.jsonl"], model, tmp_path / "rows")
    rows, tokenizer = Rows.open(tmp_path / "rows"), LocalEngine(str(model)).tokenizer
    taught = {tokenizer.decode(ids[mask]) for ids, mask in (rows[i] for i in range(2))}
    assert taught == {"re: endless", "re: four<|im_end|>"}
