"""Verifies the public files of a draw with the standard library, by docs/draws-format.md: BUNDLE LEAVES [BEACON]

BEACON is what drand itself answers for the round: its signature is compared, not verified. Without it the seed of a
round is UNCHECKED. Exit status 0, 1 if something is broken, 3 if there is no seed or units are not offered.
"""

import hashlib
import json
import sys
from datetime import datetime
from fractions import Fraction
from string import ascii_letters
from typing import Any, Dict, List, Optional, Tuple
from uuid import UUID

GENESIS, PERIOD, ROUNDS = 1692803367, 3, 3
EARLY = "its round was known before its time by the clock of Postgres, which was behind: "
EARLY += "the list may have been frozen when the seed was public"


def require(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"BROKEN: {what}")


def hashed(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def root_of(leaves: List[bytes]) -> bytes:
    level = leaves or [hashed()]
    while len(level) > 1:
        pairs = [hashed(b"\1", *level[i : i + 2]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) & ~1 :]
    return level[0]


def seconds(text: str) -> Fraction:
    whole, _, part = text.rstrip("Z").partition(".")
    at = datetime.fromisoformat(whole + "+00:00").timestamp()
    return Fraction(int(at)) + Fraction(int(part or 0), 10 ** len(part))


def rounds_of(b: Dict[str, Any]) -> List[int]:
    rounds: List[int] = []
    for n in range(1, ROUNDS + 1):
        at = seconds(b["closes_at"]) + n * b["freeze_seconds"]
        rounds.append(1 + max(0, -((GENESIS - at) // PERIOD)))
        if seconds(b["frozen_at"]) < GENESIS + (rounds[-1] - 1) * PERIOD:
            return rounds
    return []


def seed_of(b: Dict[str, Any], beacon: Optional[Dict[str, Any]]) -> Tuple[bytes, str]:
    source, parties, rounds = b["seed"], b["seed"].get("parties", []), rounds_of(b)
    require(seconds(b["frozen_at"]) >= seconds(b["closes_at"]), "frozen before the entries closed")
    if source["kind"] == "parties":
        commitments, secrets = ([bytes.fromhex(p.get(of, "")) for p in parties] for of in ("commitment", "secret"))
        require(0 < len(parties) <= 16 and len(set(commitments)) == len(parties), "not the parties of a draw")
        require([hashed(s) for s in secrets] == commitments, "a secret is missing, or not that of its commitment")
        bound = [UUID(b["sale_id"]).bytes, bytes.fromhex(b["root"]), *commitments] if b["version"] > 1 else []
        return hashed(b"stampede draw seed 2" if bound else b"stampede draw seed", *bound, *secrets), "kept"
    require(source["kind"] == "drand" and len(rounds) > 0, "no kind of seed, or frozen after the last round")
    require(rounds == b["rounds"] and rounds[-1] == source["round"], "not the round of the rule")
    answer = beacon or source
    require([answer[k] == source[k] for k in ("round", "signature")] == [True, True], "drand has answered another one")
    return hashed(bytes.fromhex(source["signature"])), "kept" if beacon else "UNCHECKED"


def without_seed(b: Dict[str, Any]) -> str:
    rounds, known, old = rounds_of(b), bool(b.get("rounds")), b["version"] == 1
    silent = [p for p in b.get("parties", []) if hashed(bytes.fromhex(p.get("secret", ""))).hex() != p["commitment"]]
    at, reveal_by = seconds(b.get("voided_at", b["frozen_at"])), max(3600, 3 * b["freeze_seconds"])
    late = not known and (old or bool(silent) and at > seconds(b["frozen_at"]) + reveal_by)
    early = len(rounds) > 0 and (old or at < GENESIS + (rounds[-1] - 1) * PERIOD)
    require("seed" not in b and not b["offers"], "a void draw has a seed, or offers are without one")
    require(old or known != bool(b.get("parties")), "neither parties nor rounds give its seed, or both do")
    rules = {None: True, EARLY: known and early, "a party has not revealed its secret in time": late}
    rules["the list of the entries was not frozen before the last round"] = not rounds
    require(rules.get(b.get("void_reason"), False), "the draw is not void by a rule")
    return "UNKNOWN"


def verify(b: Dict[str, Any], data: bytes, beacon: Optional[Dict[str, Any]] = None) -> str:
    require(b["version"] in (1, 2) and len(data) == 33 * b["entries"], "another version, or length of the list")
    records = [data[i : i + 33] for i in range(0, len(data), 33)]
    leaves = [hashed(b"\0", r) for r in records]
    require(root_of(leaves).hex() == b["root"], "the list has another root")
    states = [b["goods"] if b["version"] > 1 else b, *b.get("restocks", []), b]
    items = [s.get("items") or [{"code": "", **s}] for s in states]
    stocks, revisions = [[(i["code"], i["stock"]) for i in of] for of in items], [s["revision"] for s in states[1:-1]]
    require(all([c for c, _ in s] == [c for c, _ in stocks[-1]] for s in stocks), "the items were exchanged")
    require(sorted({*revisions}) == revisions and max([0, *revisions]) <= b.get("revision", 0), "no such revision")
    require(stocks[-2] == stocks[-1] and b["stock"] == sum(n for _, n in stocks[-1]), "no change leads to the stock")
    letters = {code: ord(ascii_letters[n]) if code else 0 for n, (code, _) in enumerate(stocks[-1])}
    require(all(r[0] in letters.values() for r in records), "an entry is of no item")
    if "void_reason" in b or "seed" not in b:
        return without_seed(b)
    seed, verdict = seed_of(b, beacon)
    sold = {i["code"]: i.get("sold", 0) for i in items[0]}
    for code, units in stocks[-1]:
        ranked = sorted((hashed(seed, leaf), n) for n, leaf in enumerate(leaves) if records[n][0] == letters[code])
        offers = [o for o in b["offers"] if o.get("item", "") == code]
        require([o["rank"] for o in offers] == list(range(len(offers))), "a rank is not next")
        require([o["place"] for o in offers] == [n for _, n in ranked[: len(offers)]], "not the lowest scores")
        left = units - sold[code] - [o["outcome"] for o in offers].count("offered")
        verdict = "UNKNOWN" if left > 0 and len(offers) < len(ranked) else verdict
    for o in b["offers"]:
        held = ["already-purchased"] if b["version"] == 1 or o["place"] in states[0].get("holders", []) else []
        reasons = {"offered": [""], "skipped": ["entry-cancelled", *held]}.get(o["outcome"], [])
        require(o.get("reason", "") in reasons and o.get("item", "") in letters, "no reason, or no item")
    return verdict


if __name__ == "__main__":
    files = [open(name, "rb").read() for name in sys.argv[1:]]
    found = verify(json.loads(files[0]), files[1], json.loads(files[2]) if files[2:] else None)
    print("draw:", found)
    sys.exit(3 if found == "UNKNOWN" else 0)
