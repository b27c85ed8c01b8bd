"""Samples of `bench images` as tables and bars. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scripts.benchlib.common import Bar, median, show, table

Samples = Mapping[str, Sequence[float]]
Results = Mapping[tuple[str, int], Samples]
PEAK = 256 << 20
CORES = os.cpu_count() or 1
CHECKPOINTS = ("first_parked", "first", "contiguous_parked", "contiguous", "scattered_parked", "scattered", "pages")
_FIRST = "script_first_total"
SECOND = ("contiguous", "scattered")  # the 5 % that the bars are about; single pages are told beside them


def bars(results: Results, sizes: Sequence[int]) -> list[Bar]:
    """Each promise of the issue, at every size and store it was measured on. Ratios are medians of the rounds' ratios:
    both sides of one were taken within the same minute."""
    found: list[Bar] = []
    for (store, size), one in results.items():
        where = f"{store}, {size} MiB"
        raw = [(before + after) / 2 for before, after in zip(one["raw_dump"], one["raw_dump_again"], strict=True)]
        undisturbed = min([*one["raw_dump"], *one["raw_dump_again"]])
        first, second = one["script_first_total"], one["script_second_total"]
        cpu_bound = median([a / b / CORES for a, b in zip(one["stream_cpu"], first, strict=True)])
        dump_bound = median([a / b for a, b in zip(raw, second, strict=True)])
        for key, words in (("first_parked", "first, parked"), ("first", "first, left running")):
            bar = _against(f"{words}: total / script's", where, one[f"{key}_total"], first, 0.5)
            found.append(replace(bar, floor=cpu_bound))
        found += _against_upload(results, store, size)
        frozen = _against("first: frozen / raw dump", where, one["first_frozen"], raw, 1.2)
        found.append(replace(frozen, best=min(one["first_frozen"]) / undisturbed))
        for pattern in SECOND:
            new = median([a / b for a, b in zip(one[f"{pattern}_new"], one["first_stored"], strict=True)])
            found.append(Bar(f"5 % {pattern}: bytes / first's", where, new, 0.1, "stored"))
            for key, words in ((f"{pattern}_parked", "parked"), (pattern, "left running")):
                bar = _against(f"5 % {pattern}, {words}: total / script's", where, one[f"{key}_total"], second, 0.5)
                found.append(replace(bar, floor=dump_bound))
            frozen = _against(f"5 % {pattern}: frozen / raw dump", where, one[f"{pattern}_frozen"], raw, 1.2)
            found.append(replace(frozen, best=min(one[f"{pattern}_frozen"]) / undisturbed))
        peak = max(max(values) for key, values in one.items() if key.endswith("_peak"))
        found.append(Bar("peak memory, MiB", where, peak / (1 << 20), PEAK / (1 << 20), "largest of all rounds"))
        rivals = zip(one["raw_restore"], one["raw_restore_again"], one["script_fetch"], strict=True)
        rival = [min(before, after) + fetch for before, after, fetch in rivals]
        found.append(_against("all memory back / (raw restore + fetch)", where, one["restore_total"], rival, 1.5))
    found += _first_output(results, sizes)
    return found


def _against_upload(results: Results, store: str, size: int) -> list[Bar]:
    """The script that the issue names uploads what it made. One that only writes it to a disk, which `file` is
    compared with besides, spares itself a third of its work."""
    if store != "file" or ("s3", size) not in results:
        return []
    one, other = results[store, size], results["s3", size]
    rows = (("first_parked", "first, parked", "first"), ("contiguous_parked", "5 % contiguous, parked", "second"))
    return [
        _against(
            f"{words}: total / that of the script, uploading",
            f"{store}, {size} MiB",
            one[f"{key}_total"],
            other[f"script_{which}_total"],
            0.5,
        )
        for key, words, which in rows
    ]


def _first_output(results: Results, sizes: Sequence[int]) -> list[Bar]:
    small, large = min(sizes), max(sizes)
    found = []
    for store in dict.fromkeys(store for store, _ in results):
        few, many = results[store, small], results[store, large]
        where = f"{store}, {large} / {small} MiB"
        for name, basis, pick in (
            ("first output from local chunks", "wall, fetch excluded, medians, in turns", _after_fetch),
            ("first output, --lazy", "wall, whole command, medians, in turns", _lazily),
        ):
            large_s, small_s = pick(many, "turns_"), pick(few, "turns_")
            ratio, best = median(large_s) / median(small_s), min(large_s) / min(small_s)
            found.append(Bar(name, where, ratio, 1.3, basis, best))
    return found


def tables(results: Results) -> str:
    return "\n".join([_checkpoints(results), _steps(results), _restores(results), _phases(results)])


def _checkpoints(results: Results) -> str:
    rows = []
    for (store, size), one in results.items():
        for key in CHECKPOINTS:
            script = "script_first" if key.startswith("first") else "script_second"
            rows.append(
                [
                    f"{store} {size}",
                    key.replace("_", ", "),
                    show([*one["raw_dump"], *one["raw_dump_again"]]),
                    "-" if key.endswith("parked") else show(one[f"{key}_frozen"]),
                    show(one[f"{script}_total"]),
                    show(one[f"{key}_total"]),
                    f"{_ratio(one, f'{key}_total', f'{script}_total'):.2f}",
                    f"{median(one[f'{script}_cpu']):.2f}",
                    f"{median(one[f'{key}_cpu']):.2f}",
                    show(one[f"{script}_stored"], "MiB").split(" ")[0],
                    show(one[f"{key}_new"], "MiB").split(" ")[0],
                    f"{max(one[f'{key}_peak']) / (1 << 20):.0f}",
                ]
            )
    head = ["store, MiB", "what", "raw dump s", "ours frozen s", "script s", "ours s", "ratio"]
    head += ["script CPU s", "ours CPU s", "script MiB", "ours MiB", "peak MiB"]
    return table("Checkpoint: median (min–max)", head, rows)


def _steps(results: Results) -> str:
    """Show the longest step of the script: with all steps at the same time and cores to spare, it is the lower bound
    for any program that dumps and sends the same bytes."""
    rows = []
    for (store, size), one in results.items():
        steps = [one[f"script_first_{step}"] for step in ("dump", "pack", "send")]
        longest = [max(each) / total for *each, total in zip(*steps, one[_FIRST], strict=True)]
        bare = [*map(show, (one["stream_total"], one["stream_cpu"])), f"{_ratio(one, 'stream_total', _FIRST):.2f}"]
        rows.append([f"{store} {size}", *map(show, steps), show(one[_FIRST]), f"{median(longest):.2f}", *bare])
    head = ["store, MiB", "dump s", "tar and zstd s", "upload or fsync s", "script s", "longest step / script"]
    head += ["only sent s", "… CPU s, the server's too", "only sent / script"]
    return table("The script, step by step, and memory that is only sent: median (min–max)", head, rows)


def _restores(results: Results) -> str:
    rows = []
    for (store, size), one in results.items():
        steps = zip(one["raw_restore"], one["script_fetch"], one["script_unpack"], strict=True)
        script = [restore + fetch + unpack for restore, fetch, unpack in steps]
        rows.append(
            [
                f"{store} {size}",
                show([*one["raw_restore"], *one["raw_restore_again"]]),
                show(one["script_fetch"]),
                show(script),
                show(_after_fetch(one, "")),
                show(one["restore_first_output"]),
                show(one["restore_total"]),
                show(one["lazy_first_output"]),
                show(one.get("lazy_complete", [])),
                f"{max([*one['restore_peak'], *one['lazy_peak']]) / (1 << 20):.0f}",
            ]
        )
    head = ["store, MiB", "raw restore s", "fetch s", "script: fetch, unpack, restore s"]
    head += ["first output, fetch excluded s", "… included s", "all memory s", "--lazy first output s", "--lazy all s"]
    return table("Restore: median (min–max)", [*head, "peak MiB"], rows)


def _phases(results: Results) -> str:
    rows = []
    for (store, size), one in results.items():
        for key in ("first_parked", "first", "contiguous_parked", "contiguous", "restore", "lazy"):
            mark = f"{key}_phase_"
            parts = [f"{name.removeprefix(mark)} {median(v):.3f}" for name, v in one.items() if name.startswith(mark)]
            rows.append([f"{store} {size}", key.replace("_", ", "), ", ".join(parts)])
    return table("Where our time goes: median seconds", ["store, MiB", "what", "phases"], rows)


def _against(name: str, where: str, ours: Sequence[float], theirs: Sequence[float], limit: float) -> Bar:
    ratio = median([a / b for a, b in zip(ours, theirs, strict=True)])
    return Bar(name, where, ratio, limit, "wall, median of the rounds' ratios", min(ours) / min(theirs))


def _ratio(one: Samples, ours: str, theirs: str) -> float:
    return median([a / b for a, b in zip(one[ours], one[theirs], strict=True)])


def _after_fetch(one: Samples, key: str) -> list[float]:
    """Of the restores whose names begin with `key`."""
    rows = zip(one[f"{key}restore_first_output"], one[f"{key}restore_phase_fetch"], strict=True)
    return [first - fetch for first, fetch in rows]


def _lazily(one: Samples, key: str) -> list[float]:
    return list(one[f"{key}lazy_first_output"])
