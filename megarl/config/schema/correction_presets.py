"""Rollout correction by name: each preset is a set of departures of the ``algorithm`` section.

Names and numbers are those of verl's rollout correction, so that its users find what they know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

CorrectionPreset = Literal[
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_token_tis",
    "decoupled_geo_rs_seq_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_token_tis",
    "decoupled_k3_rs_seq_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_token_tis",
    "bypass_pg_geo_rs_seq_tis",
    "disabled",
]

_TOKEN: dict[str, Any] = {"weights": "token", "upper": 2.0}
_SEQUENCE: dict[str, Any] = {"weights": "sequence", "upper": 2.0}
_GEO: dict[str, Any] = {"reject": [{"statistic": "seq_mean_k1", "lower": 0.999, "upper": 1.001}]}
_K3: dict[str, Any] = {"reject": [{"statistic": "seq_mean_k3", "upper": 0.01}]}
_BAND = {"lower": 0.5, "upper": 5.0}
_SEQUENCE_REJECTION = {"reject": [{"statistic": "seq_sum_k1", "lower": 0.5, "upper": 2.0}]}


def _decoupled(*parts: Mapping[str, Any]) -> dict[str, Any]:
    correction: dict[str, Any] = {}
    for part in parts:
        correction |= part
    return {"old_log_probs": "decoupled", "correction": correction}


def _bypass(kind: str, correction: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    loss = {"kind": kind} | ({"options": options} if options else {})
    return {"old_log_probs": "bypass", "policy_loss": loss} | ({"correction": dict(correction)} if correction else {})


CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": _decoupled(_TOKEN),
    "decoupled_seq_is": _decoupled(_SEQUENCE),
    "decoupled_token_icepop": _decoupled(_TOKEN, _BAND),
    "decoupled_seq_is_rs": _decoupled(_SEQUENCE, _SEQUENCE_REJECTION),
    "decoupled_geo_rs": _decoupled(_GEO),
    "decoupled_geo_rs_token_tis": _decoupled(_TOKEN, _GEO),
    "decoupled_geo_rs_seq_tis": _decoupled(_SEQUENCE, _GEO),
    "decoupled_k3_rs": _decoupled(_K3),
    "decoupled_k3_rs_token_tis": _decoupled(_TOKEN, _K3),
    "decoupled_k3_rs_seq_tis": _decoupled(_SEQUENCE, _K3),
    "bypass_ppo_clip": _bypass("ppo"),
    "bypass_ppo_clip_geo_rs": _bypass("ppo", _GEO),
    "bypass_ppo_clip_k3_rs": _bypass("ppo", _K3),
    "bypass_pg_is": _bypass("reinforce", ratio_level="sequence", ratio_cap=2.0),
    "bypass_pg_token_icepop": _bypass("reinforce", ratio_level="token", ratio_cap=5.0, ratio_floor=0.5),
    "bypass_pg_geo_rs": _bypass("reinforce", _GEO, ratio_level="none"),
    "bypass_pg_geo_rs_token_tis": _bypass("reinforce", _GEO, ratio_level="token", ratio_cap=2.0),
    "bypass_pg_geo_rs_seq_tis": _bypass("reinforce", _GEO, ratio_level="sequence", ratio_cap=2.0),
    "disabled": _decoupled(),
}
"""Preset -> departures. A test binds each of them."""

_FIXED = (("old_log_probs",), ("policy_loss", "kind"))


def preset_departures(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """What the preset named in a plain ``algorithm`` section stands for; empty without one."""
    name = _at(algorithm, ("correction", "preset"))
    return CORRECTION_PRESETS.get(name, {}) if isinstance(name, str) else {}


def apply_correction_preset(algorithm: dict[str, Any]) -> dict[str, Any]:
    """The ``algorithm`` section with its correction preset, if any, spread under the keys given explicitly.

    Raises:
        ValueError: the mode or the loss is given and contradicts the preset.
    """
    departures = preset_departures(algorithm)
    if not departures:
        return algorithm
    name = algorithm["correction"]["preset"]
    for path in _FIXED:
        wanted, given = _at(departures, path), _at(algorithm, path)
        if wanted is not None and given is not None and given != wanted and (given, wanted) != ("vanilla", "ppo"):
            raise ValueError(f"correction.preset={name} means {'.'.join(path)}={wanted}, found {given}")
    return _merged(departures, algorithm)


def _at(section: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        section = section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)
    return section


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result
