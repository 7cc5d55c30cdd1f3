"""SGLang arguments pass through unchanged, and what cannot stand is refused by name before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.actors.engine.arguments import (
    check_sampling,
    checked_arguments,
    default_arguments,
    server_command,
)
from physarum.actors.engine.environment import CPU_SHIM, detect_device, engine_environment
from physarum.actors.engine.errors import EngineArgumentError
from physarum.actors.engine.schema import Argument, ServerSchema

NEW = ServerSchema(
    "0.5.23",
    [
        Argument(["--mem-fraction-static"], 1),
        Argument(["--disable-radix-cache"], 0),
        Argument(["--device"], 1),
        Argument(["--dtype"], 1, ["auto", "float32", "bfloat16"]),
        Argument(["--grammar-backend"], 1),
        Argument(["--max-total-tokens"], 1),
        Argument(["--max-running-requests"], 1),
        Argument(["--skip-server-warmup"], 0),
        Argument(["--sleep-on-idle"], 0),
        Argument(["--cuda-graph-backend-decode"], 1, ["full", "disabled"]),
        Argument(["--cuda-graph-backend-prefill"], 1, ["full", "disabled"]),
        Argument(["--cuda-graph-bs"], "+"),
        Argument(["--enable-cudagraph-gc", "--no-enable-cudagraph-gc"], 0),
        Argument(["--json-model-override-args"], 1),
        Argument(["--port"], 1),
        Argument(["--model-path", "--model"], 1),
    ],
)


def command(user: dict[str, object]) -> list[str]:
    return server_command(Path("/py"), Path("/m"), 7, "policy@1.0", user, "cuda", NEW)[11:]


def test_values_switches_lists_and_maps_are_rendered() -> None:
    assert command({"mem-fraction-static": 0.3}) == ["--mem-fraction-static", "0.3"]
    assert command({"disable_radix_cache": True}) == ["--disable-radix-cache"]
    assert command({"disable-radix-cache": False}) == []
    assert command({"enable-cudagraph-gc": False}) == ["--no-enable-cudagraph-gc"]
    assert command({"cuda-graph-bs": [1, 2, 4]}) == ["--cuda-graph-bs", "1", "2", "4"]
    assert command({"json-model-override-args": {"a": 1}}) == ["--json-model-override-args", '{"a": 1}']


def test_the_command_names_model_port_and_label() -> None:
    words = server_command(Path("/py"), Path("/m"), 7, "policy@1.0", {}, "cuda", NEW)
    assert " ".join(words) == (
        "/py -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 7 --weight-version policy@1.0"
    )


def test_chunks_hold_only_what_is_new_where_the_release_can() -> None:
    can = ServerSchema("0.5.23", [*NEW.arguments, Argument(["--incremental-streaming-output"], 0)])
    assert default_arguments("cuda", can) == {"incremental-streaming-output": True}
    assert default_arguments("cuda", NEW) == {}


def test_user_values_replace_defaults_and_null_removes_one() -> None:
    words = server_command(Path("/py"), Path("/m"), 7, "p@1.0", {"dtype": "bfloat16", "device": None}, "cpu", NEW)
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "--device" not in words


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(EngineArgumentError) as caught:
        checked_arguments({"mem-fraction-statik": 1, "port": 3, "dtype": "int3", "disable-radix-cache": "yes"}, NEW)
    message = str(caught.value)
    assert "sglang 0.5.23 has no argument mem-fraction-statik; did you mean mem-fraction-static?" in message
    assert "port cannot be set here: a free port is reserved" in message
    assert "dtype is 'int3', expected one of auto, float32, bfloat16" in message
    assert "disable-radix-cache is a switch: found 'yes'" in message


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"dtype": True}, "takes a value"),
        ({"dtype": ["float32", "auto"]}, "takes one value"),
        ({"mem_fraction_static": 1, "mem-fraction-static": 2}, "given twice"),
        ({"--model": "x"}, "set model:"),
        ({"api-key": "x"}, "secrets never stand on a command line"),
    ],
)
def test_wrong_forms_are_refused(user: dict[str, object], words: str) -> None:
    with pytest.raises(EngineArgumentError, match=words):
        checked_arguments(user, NEW)


def test_cpu_defaults_use_the_words_of_the_release() -> None:
    old = ServerSchema("0.5.15.post1", [Argument(["--disable-cuda-graph"], 0)])
    new, earlier = default_arguments("cpu", NEW), default_arguments("cpu", old)
    assert new["cuda-graph-backend-decode"] == "disabled" and new["sleep-on-idle"] is True
    assert earlier["disable-cuda-graph"] is True and "sleep-on-idle" not in earlier
    assert default_arguments("cuda", NEW) == {}


def test_environment_hides_our_packages_and_secrets() -> None:
    base = {"PYTHONPATH": "/ours", "PHYSARUM_NATS_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s", "PATH": "/bin"}
    cpu = engine_environment("cpu", {"OMP_NUM_THREADS": "2"}, base)
    assert cpu["PYTHONPATH"] == str(CPU_SHIM) and cpu["OMP_NUM_THREADS"] == "2" and cpu["PATH"] == "/bin"
    assert "PHYSARUM_NATS_TOKEN" not in cpu and "AWS_SECRET_ACCESS_KEY" not in cpu
    cuda = engine_environment("cuda", {"PYTHONPATH": "/theirs"}, base)
    assert cuda["PYTHONPATH"] == "/theirs" and "SGLANG_USE_CPU_ENGINE" not in cuda


def test_hidden_devices_mean_cpu() -> None:
    assert detect_device({"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    assert detect_device({"CUDA_VISIBLE_DEVICES": "-1"}) == "cpu"


def test_deterministic_sampling_is_refused_where_the_server_could_not_start() -> None:
    schema = ServerSchema("0.5.23", [*NEW.arguments, Argument(["--enable-deterministic-inference"], 0)])
    user = {"enable_deterministic_inference": True}
    words = server_command(
        Path("/py"), Path("/m"), 7, "p@1.0", {"enable-deterministic-inference": True}, "cuda", schema
    )
    assert "--enable-deterministic-inference" in words
    with pytest.raises(
        EngineArgumentError, match="enable-deterministic-inference is set, and SGLang is deterministic on CUDA alone"
    ):
        server_command(Path("/py"), Path("/m"), 7, "p@1.0", user, "cpu", schema)


def test_sampling_parameters_of_another_release_are_refused_by_name() -> None:
    known = ServerSchema("0.5.15.post1", [], ["temperature", "top_p"])
    check_sampling(["temperature"], known)
    check_sampling(["watermark"], ServerSchema("0.5.10", []))  # nobody said what it takes
    with pytest.raises(EngineArgumentError, match=r"sglang 0.5.15.post1 has no sampling parameter watermark"):
        check_sampling(["temperature", "watermark"], known)
