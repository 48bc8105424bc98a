"""``jaxrl-dist doctor``: on this machine, and on others that are made up."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxrl_dist import cli
from jaxrl_dist.commands import accelerators, doctor

PROBE = doctor.probe
HEALTHY: dict[str, dict[str, Any]] = {
    "devices": {
        "said": "",
        "devices": [{"platform": "cpu", "number": 0, "kind": "cpu", "memory": None, "error": None}],
    },
    **{name: {"said": "", "ids": 3} for name in ("gymnax", "envpool", "gymnasium")},
}
GPU = {"platform": "gpu", "number": 0, "kind": "NVIDIA H200", "memory": 150 * 10**9, "error": None}


@pytest.mark.case  # the other tests of the file
def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for package in (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "gymnax",
        "gymnasium",
        "orbax-checkpoint",
        "rich",
    ):
        assert re.search(
            rf"^{package} +{re.escape(importlib.metadata.version(package))}$", out, re.MULTILINE
        )
    for line in (
        r"python .*\d\.\d+\.\d+ .*",
        r"extra test +installed",
        r"extra cuda12 .*",
        r"CPU +\d+ cores? of \d+, .*",
        r"memory +[\d.]+ GB, [\d.]+ GB available.*",
        r"disk +[\d.]+ GB free in .*",
        r"\w+ 0 .*, computes",
        r"backend gymnax +imported, \d+ environments",
        r"backend envpool +imported, \d+ environments",
        r"backend gymnasium +imported, \d+ environments",
        "this machine can train",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), line


class Machine:
    """One that is made up: files, installed packages, and what the probes say."""

    def __init__(self, root: Path) -> None:
        self.root, self.probes = root, {name: dict(answer) for name, answer in HEALTHY.items()}
        self.versions = dict.fromkeys(
            (name for names in doctor.requirements().values() for name in names), "1.0"
        )
        for name in accelerators.PLUGINS.values():
            del self.versions[name]
        self.write("proc/cpuinfo", "processor : 0\nflags\t\t: fpu avx avx2\n")
        self.write("proc/meminfo", "MemTotal:  16000000 kB\nMemAvailable:  8000000 kB\n")

    def write(self, path: str, text: str = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(accelerators, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "probe", made.probes.__getitem__)
    monkeypatch.setattr(accelerators, "version", lambda package: made.versions.get(package))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return made


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], list[str]]:
    """Exit code, notes and problems; nothing goes to stderr."""
    code = cli.main(["doctor"])
    out, err = capsys.readouterr()
    assert err == ""
    assert (out.splitlines()[-1] == "this machine can train") == (code == 0)
    return code, *(
        re.findall(rf"^{kind}: (.*)$", out, re.MULTILINE) for kind in ("note", "problem")
    )


def test_a_healthy_machine_is_told_nothing(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys) == (0, [], [])


def test_a_machine_without_envpool_can_train(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda package: ["jax", 'envpool>=1.2; extra == "envpool"']
    )
    del machine.versions["envpool"], machine.probes["envpool"]
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "backend envpool" not in out and "note" not in out
    assert re.search(
        r"^extra envpool +without envpool\nextras +install one with pip install 'jaxrl-dist\[NAME\]'",
        out,
        re.M,
    )


PIP = re.escape(f"{sys.executable} -m pip install")


def driver(version: str) -> str:
    return f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Jan  1\nGCC version:  12.2.0\n"


@pytest.mark.parametrize(
    "version, message",
    [
        (None, rf"{PIP} 'jax\[cuda12\]==1.0'$"),
        ("535.104.05", rf"{PIP} 'jax\[cuda12\]==1.0'$"),
        ("580.65.06", rf"{PIP} 'jax\[cuda13\]==1.0'$"),
        ("470.82.01", "its driver 470 is older than 525, which CUDA 12 needs$"),
    ],
)
def test_a_gpu_without_a_plugin(
    version: str | None, message: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.write("dev/nvidia0")
    if version is not None:
        machine.write("proc/driver/nvidia/version", driver(version))
    code, (note,), problems = run(capsys)
    assert (code, problems) == (0, []) and note.startswith(
        "this machine has an NVIDIA GPU, but JAX does not use it: "
    )
    assert re.search(message, note)


def test_a_gpu_that_only_nvidia_smi_shows(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None
    )
    _, (note,), _ = run(capsys)
    assert "jax[cuda12]" in note


def test_a_gpu_whose_plugin_does_not_start(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.write("dev/nvidia0")
    machine.versions["jax-cuda12-plugin"] = "1.0"
    machine.probes["devices"]["said"] = "CUDA_ERROR_NO_DEVICE"
    assert run(capsys)[1] == [
        "this machine has an NVIDIA GPU, but JAX does not use it: JAX's CUDA plugin is installed, but does not start: CUDA_ERROR_NO_DEVICE"
    ]


def test_a_gpu_that_works(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.write("dev/nvidia0")
    machine.versions["jax-cuda12-plugin"] = "1.0"
    machine.probes["devices"]["devices"] = [GPU]
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert (
        re.search(r"^gpu 0 +NVIDIA H200, 150.0 GB, computes$", out, re.MULTILINE)
        and "note" not in out
    )
    assert re.search(r"^extra cuda12 +installed$", out, re.MULTILINE)


@pytest.mark.parametrize(
    "device, platforms, message",
    [
        ("0x0063", None, rf"install its plugin: {PIP} 'jax\[tpu\]==1.0'$"),
        ("0x0063", "cpu", "JAX_PLATFORMS=cpu hides it$"),
        ("0x0042", None, None),  # Google's network card
    ],
)
def test_a_tpu(
    device: str,
    platforms: str | None,
    message: str | None,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in {"vendor": "0x1ae0\n", "device": f"{device}\n"}.items():
        machine.write(f"sys/bus/pci/devices/0000:00:04.0/{name}", text)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    code, notes, _ = run(capsys)
    assert code == 0 and len(notes) == (message is not None)
    if message is not None:
        assert notes[0].startswith(
            "this machine has a TPU, but JAX does not use it: "
        ) and re.search(message, notes[0])


def test_a_variable_that_hides_the_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.write("dev/nvidia0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert run(capsys)[1] == [
        "this machine has an NVIDIA GPU, but JAX does not use it: JAX_PLATFORMS=cpu hides it"
    ]


def test_what_stands_in_the_way_of_training(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.write("proc/cpuinfo", "flags\t\t: fpu sse4_2\n")
    del machine.versions["optax"]
    machine.probes["devices"]["devices"] = [
        GPU,
        {**GPU, "number": 1, "error": "XlaRuntimeError: INTERNAL"},
    ]
    code, notes, problems = run(capsys)
    assert (code, notes) == (1, []) and len(problems) == 3
    assert problems[0].startswith("optax must be installed: ") and problems[0].endswith(
        "pip install optax"
    )
    assert "no AVX" in problems[1]
    assert problems[2] == "gpu 1 cannot run a jitted computation: XlaRuntimeError: INTERNAL"
    machine.probes["devices"] = {"error": "it ended Python: Illegal instruction"}
    assert "JAX does not work: it ended Python: Illegal instruction" in run(capsys)[2]


def test_backends(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """One that works is enough."""
    machine.probes["envpool"] = machine.probes["gymnax"] = {"error": "ImportError: libGL.so.1"}
    code, notes, _ = run(capsys)
    assert code == 0
    assert notes == [
        f"{name} cannot be imported: ImportError: libGL.so.1" for name in ("gymnax", "envpool")
    ]
    machine.probes["gymnasium"] = {"error": "ImportError: libGL.so.1"}
    code, notes, problems = run(capsys)
    assert (code, notes, len(problems)) == (1, [], 3)


def test_little_room(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5 * 10**8))
    machine.write("sys/fs/cgroup/memory.max", "4000000000\n")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^note: .* has only 500.0 MB free", out, re.MULTILINE)
    assert re.search(
        r"^memory +16.4 GB, 8.2 GB available; this container's limit is 4.0 GB$", out, re.MULTILINE
    )


def test_a_machine_that_tells_nothing(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No /proc, and no metadata of the package."""
    monkeypatch.setattr(accelerators, "ROOT", tmp_path / "nowhere")
    monkeypatch.setattr(doctor, "PACKAGE", "a-package-that-is-not-there")
    assert run(capsys) == (0, [], [])


# --- Probes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, error",
    [
        ("kill -ILL $$", "it ended Python: Illegal instruction"),
        ("exec sleep 60", "no answer within 0.5 s"),
        ("echo first >&2; echo last >&2; exit 3", "last"),
        ("echo no json; exit 3", "exit code 3"),
    ],
)
def test_a_library_that_ends_the_process(
    script: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(doctor, "SECONDS", 0.5 if "sleep" in script else 20.0)
    assert doctor.probe("devices") == {"error": error}


def test_jax_without_a_device_is_said_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("JAX_PLATFORMS", "moon")
        error = PROBE("devices")["error"]
    assert error.startswith("JAX has no device for JAX_PLATFORMS=moon: ")
    machine.probes["devices"] = machine.probes["gymnax"] = {"error": error}
    assert run(capsys) == (1, [], [f"JAX does not work: {error}"])


def test_a_python_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert doctor.probe("devices") == {
        "error": "/nowhere/python cannot be started: No such file or directory"
    }


def test_a_backend_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gymnasium.py").write_text("raise ImportError('libGL.so.1:\\n  cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.probe("gymnasium")["error"] == "ImportError: libGL.so.1: cannot open"
