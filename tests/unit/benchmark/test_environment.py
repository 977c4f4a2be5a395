"""Where a run was measured, read from the files of a made-up machine; what is not there is null."""

from __future__ import annotations

from pathlib import Path

from edgespec.benchmark.environment import environment, state

CPU = "sys/devices/system/cpu"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_nothing_is_guessed_where_nothing_can_be_read(tmp_path: Path) -> None:
    found = environment(tmp_path)
    for name in ("memory_bytes", "power_mode", "governors", "max_frequency_khz"):
        assert found[name] is None
    assert found["cores"] >= found["threads"] >= 1
    assert found["versions"]["numpy"]
    assert found["versions"]["tensorrt-rtx"] is None
    told = state(tmp_path)
    assert (told["temperatures_c"], told["frequency_khz"]) == (None, None)
    assert len(told["load_average"]) == 3


def test_a_board_with_its_governors_and_temperatures(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/device-tree/model": "NVIDIA Jetson AGX Thor\0",
            "proc/cpuinfo": "processor : 0\nmodel name : not this one\n",
            "proc/meminfo": "MemTotal:       1024 kB\nMemFree: 1 kB\n",
            "sys/firmware/acpi/platform_profile": "balanced\n",
            f"{CPU}/cpu0/cpufreq/scaling_governor": "schedutil\n",
            f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n",
            f"{CPU}/cpu2/cpufreq/scaling_governor": "schedutil\n",
            f"{CPU}/cpu0/cpufreq/scaling_max_freq": "2000000\n",
            f"{CPU}/cpu1/cpufreq/scaling_max_freq": "2600000\n",
            f"{CPU}/cpu0/cpufreq/scaling_cur_freq": "1500000\n",
            "sys/class/thermal/thermal_zone0/temp": "41500\n",
            "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
            "sys/class/thermal/thermal_zone1/temp": "unreadable\n",
        },
    )
    found = environment(root)
    assert found["device"] == "NVIDIA Jetson AGX Thor"
    assert found["memory_bytes"] == 2**20
    assert found["power_mode"] == "balanced"
    assert found["governors"] == ["performance", "schedutil"]
    assert found["max_frequency_khz"] == 2600000
    assert state(root)["temperatures_c"] == {"cpu-thermal": 41.5}
    assert state(root)["frequency_khz"] == 1500000


def test_processor_is_named_where_there_is_no_board(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name : Some CPU @ 2 GHz\n"})
    assert environment(root)["device"] == "Some CPU @ 2 GHz"
