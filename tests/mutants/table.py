"""Small, realistic mistakes in the core of the library, and the tests that notice each: an operator, a missing check, a
wrong order, something forgotten. The planted bugs of the simulator (`simulation/bugs.py`) break promises; these break
lines.

A row gives a name, the text as it is in the module, and what a slip of the hand would make of it. That text must be
found exactly once: whoever changes a line also changes its mutants. Where nobody could notice, `argued` says why.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake in one module."""

    name: str
    file: str
    """Below pkg/isthmus."""
    before: str
    after: str
    tests: tuple[str, ...]
    """Files or tests that should notice, below the root."""
    equivalent: str = ""
    """Why nothing that can be seen changes; empty where a test has to notice."""


@dataclass(frozen=True, slots=True)
class Row:
    """A mutant before it is known where it belongs."""

    name: str
    before: str
    after: str
    why: str = ""


def row(name: str, before: str, after: str) -> Row:
    """Return a mistake that has to be noticed."""
    return Row(name, before, after)


def argued(name: str, before: str, after: str, why: str) -> Row:
    """Return a mistake that cannot be noticed, and why."""
    return Row(name, before, after, why)


def of(file: str, tests: str, *rows: Row) -> list[Mutant]:
    """Return the mutants of a module that the same tests (separated by blanks) look at."""
    home = file.removesuffix(".py")
    return [Mutant(f"{home}/{r.name}", file, r.before, r.after, tuple(tests.split()), r.why) for r in rows]


def faults(mutant: Mutant, package: Path, root: Path) -> Iterator[str]:
    """Yield why a mutant does not fit the library as it is."""
    path = package / "isthmus" / mutant.file
    if not path.is_file():
        yield f"there is no {path}"
        return
    source = path.read_text()
    if (count := source.count(mutant.before)) != 1:
        yield f"its text is in {mutant.file} {count} times, not once: {mutant.before!r}"
        return
    if mutant.before == mutant.after:
        yield "it changes nothing"
    try:
        compile(source.replace(mutant.before, mutant.after), mutant.file, "exec")
    except SyntaxError as error:
        yield f"it leaves no Python: {error}"
    for test in mutant.tests:
        if not (root / test.split("::")[0]).is_file():
            yield f"there is no {test}"


MUTANTS = [
    # --- the log ------------------------------------------------------------------------------------------------------
    *of(
        "log/commits.py",
        "tests/unit/test_log_chain.py",
        row(
            "another-history-is-walked",
            "if digest is not None and commit.header.previous != digest:",
            "if False:",
        ),
        row(
            "a-segment-vouches-for-itself",
            "                if commit.header.previous != found[-1].digest:\n                    break\n",
            "",
        ),
        row(
            "the-last-in-a-segment-is-believed",
            "if len(found) > 1 and await self._pointed_at(fragment, found[-1].version) != found[-1].digest:",
            "if False:",
        ),
        row("what-follows-a-segment-is-passed-over", "asked, width = after, 1", "width = 1"),
        row("several-read-the-same-segment", "asked, width = after, 1", "asked = after"),
        row("all-of-the-log-is-asked-for-at-once", "width = min(AHEAD_MAX, 2 * width)", "width = 2 * width"),
        row("nothing-is-asked-for-ahead", "width = min(AHEAD_MAX, 2 * width)", "width = 1"),
        argued(
            "what-was-read-already-comes-again",
            "                    if commit.version <= after:\n                        continue",
            "                    if False:\n                        continue",
            "requests ahead are dropped whenever a segment brought more than one commit, and what a segment brings "
            "begins behind the commit that was asked for: nothing comes twice",
        ),
        row("the-end-is-looked-for-from-the-oldest", "version = snapshots[0][0]", "version = snapshots[-1][0]"),
        row(
            "written-at-is-exclusive",
            "if commit.header.written_at <= time else",
            "if commit.header.written_at < time else",
        ),
        row("a-lost-reply-is-a-lost-round", "return found.digest == ours", "return False"),
        row("whatever-is-there-is-ours", "return found.digest == ours", "return True"),
        row(
            "one-try-to-append",
            "            except Unavailable:\n                found = None\n",
            "            except Unavailable:\n                return False\n",
        ),
        row(
            "a-commit-of-another-fragment",
            "found, wanted = (header.run, header.fragment, header.version), (self.run.digest, fragment, version)",
            "found, wanted = (header.run, header.version), (self.run.digest, version)",
        ),
        row("any-arithmetic", "if header.arithmetic != ARITHMETIC:", "if header.arithmetic < ARITHMETIC:"),
        row(
            "a-commit-of-nothing",
            "if bool(header.inputs) == (header.healed is not None):",
            "if bool(header.inputs) and header.healed is not None:",
        ),
        row("a-segment-is-taken-on-trust", "if found != at.digest:", "if False:"),
    ),
    *of(
        "log/fold.py",
        "tests/unit/test_fold_walk.py",
        row("the-snapshot-asked-for-is-passed-over", "version > at_most:", "version >= at_most:"),
        row("one-version-too-far", "if at.version == until:", "if until is not None and at.version > until:"),
        row("a-version-short-is-good-enough", "if until is not None and at.version < until:", "if False:"),
        row("one-commit-too-few-is-kept", "max(1, version - keep + 1)", "max(1, version - keep + 2)"),
        row("the-oldest-commits-are-kept", "(*at.last, commit)[-keep:])", "(*at.last, commit)[:keep])"),
        row(
            "any-state-is-believed",
            "        if found != wanted:\n            by =",
            "        if False:\n            by =",
        ),
        row("inputs-may-come-to-anything", "if result.state_digest != commit.header.state_digest:", "if False:"),
        row(
            "everybody-weighs-the-same",
            "(add, update.gradient, given.weight, given.scale)",
            "(add, update.gradient, 1.0)",
        ),
        row(
            "a-refused-input-is-an-outage",
            "    except Denied as error:\n        raise LogCorrupt(given.key,",
            "    except Denied as error:\n        raise error\n        raise LogCorrupt(given.key,",
        ),
        row(
            "any-version-0-will-do",
            "if commit is None and key != snapshot_key(fragment, 0, self.log.run.header.snapshots[fragment]):",
            "if False:",
        ),
        row(
            "a-difference-fits-any-version",
            "if merge.array_digest(out) != header.published_digest:",
            "if False:",
        ),
        row(
            "the-first-healing-is-gone-on-from",
            "            found = commit, last\n",
            "            found = commit, last\n            break\n",
        ),
        argued(
            "a-snapshot-of-anything",
            '    if found != wanted:\n        raise LogCorrupt(key, f"is of fragment',
            '    if False:\n        raise LogCorrupt(key, f"is of fragment',
            "what a snapshot is of is checked twice: its state (or published value) must have the digest that the "
            "commit of this fragment and version recorded, and version 0 is the object that the run names by digest",
        ),
    ),
    *of(
        "log/heal.py",
        "tests/unit/test_fold_walk.py",
        row(
            "a-new-history-is-begun",
            "previous=newest.digest if newest else log.run.digest",
            "previous=log.run.digest",
        ),
        row(
            "totals-begin-anew",
            "rejected_total=dict(newest.header.rejected_total) if newest else {}",
            "rejected_total={}",
        ),
        row(
            "broken-one-version-earlier",
            "wrong.readable[1] + 1 if wrong.readable",
            "wrong.readable[1] if wrong.readable",
        ),
        row("a-version-is-given-away", "until=error.readable[1]))", "until=error.readable[1] - 1))"),
        row(
            "no-snapshot-behind-it",
            "    await log.store.put(snapshot_key(p, version, await log.sealed_digest(blob)), blob)\n",
            "",
        ),
        row(
            "whoever-was-first-is-written-over",
            "    if not await log.append(p, version, body):\n        return None\n",
            "    await log.append(p, version, body)\n",
        ),
    ),
    # --- arithmetic ---------------------------------------------------------------------------------------------------
    *of(
        "log/polar.py",
        "tests/unit/test_polar.py tests/e2e/test_denormals.py::test_a_crew_that_flushes_computes_nothing",
        row("rounding-may-leave-the-interval", "_WITHIN = 0.999", "_WITHIN = 1.2"),
        row("tall-matrices-are-not-turned", "wide = d.shape[0] <= d.shape[1]", "wide = True"),
        row("a-step-too-few", "for a, b, c in QUINTICS:", "for a, b, c in QUINTICS[:-1]:"),
        row("the-upper-half-is-left", "    if symmetric:\n        kernels.mirror(out)\n", ""),
        row("blocks-of-zeros-are-divided-by-nothing", "if norm > 0.0:", "if norm >= 0.0:"),
        row("another-thread-may-flush", "kernels.require_denormals()  # of the thread that this is\n", "pass\n"),
    ),
    *of(
        "isotropic.py",
        "tests/unit/test_polar.py tests/unit/test_rules.py",
        row("blocks-overlap", "length * (i + 1) // parts", "length * (i + 1) // parts + 1"),
        row("what-is-dear-is-the-default", "0.0 < operations <= FLOP_MAX", "0.0 < operations <= 4.0 * FLOP_MAX"),
        row("nothing-is-cheap", "0.0 < operations <= FLOP_MAX", "0.0 <= operations <= FLOP_MAX"),
        row("embeddings-count", "if s.is_matrix and s.role == TensorClass.DENSE", "if s.is_matrix"),
    ),
    *of(
        "runtime.py",
        "tests/unit/test_polar.py tests/unit/test_merge.py",
        row("a-crew-leaves-the-last-part", "pairwise(cuts)]:", "pairwise(cuts[:-1])]:"),
        row("a-crew-is-not-waited-for", "            part.result()\n", "            pass\n"),
    ),
    *of(
        "store/regions.py",
        "tests/integration/test_regions.py",
        row(
            "a-bucket-that-fails-has-no-other",
            "                self._avoid(url, error)\n                failed = error",
            "                raise",
        ),
        row(
            "an-update-is-not-stored-with-the-run",
            "        return await home()\n\n    async def put",
            "        return False\n\n    async def put",
        ),
        row(
            "nothing-is-mirrored", "if self.mirrors and self._directory and key", "if False and self._directory and key"
        ),
        row("nobody-reads-near", "if self._directory and self.near and key", "if False and self.near and key"),
        row(
            "only-one-place-is-emptied",
            "            urls = self._directory.buckets()\n        for",
            "            urls = ()\n        for",
        ),
        row("updates-elsewhere-are-not-listed", "if self._directory and prefix.startswith(UPDATES):", "if False:"),
    ),
    *of(
        "log/robust.py",
        "tests/unit/test_robust.py",
        row(
            "weights-are-believed-by-robust-merges",
            "return [min(weight, middle) for weight in weights]",
            "return list(weights)",
        ),
        row(
            "every-vote-is-as-heavy",
            "return [min(weight, middle) for weight in weights]",
            "return [1.0] * len(weights)",
        ),
        row("a-robust-length-is-unclipped", "k.weight, k.scale * norm, 1.0 / norm", "k.weight, norm, 1.0 / norm"),
        row("each-update-is-a-vote", "found.setdefault(k.learner, [])", "found.setdefault(str(id(k)), [])"),
        row("several-are-unclipped", "k.weight / weight * k.scale) for k in own", "k.weight / weight) for k in own"),
        row("nothing-is-trimmed-of-three", "1 if count >= 3 else 0", "0"),
    ),
    *of(
        "log/merge.py",
        "tests/unit/test_rounding.py tests/unit/test_fold_walk.py tests/unit/test_merge.py "
        "tests/integration/test_one_loop.py::test_an_isotropic_run_folds_to_what_was_merged",
        row(
            "what-the-codec-drops-is-never-carried",
            "kernels.subtract(master, state.published[at], published[at])",
            "kernels.subtract(master, state.master[at], published[at])",
        ),
        row(
            "cancelling-is-not-relative-to-weights",
            "if whole > 0.0 and norm / whole >= CANCELLED_BELOW:",
            "if whole > 0.0 and norm >= CANCELLED_BELOW:",
        ),
        row("whole-tensors-cancel-sooner", "CANCELLED_BELOW = 1e-3", "CANCELLED_BELOW = 1e-2"),
        row("quantity-without-quality", "return tokens * (tokens / steps)", "return float(tokens)"),
        row("weights-are-absolute", "        weight /= self._unit\n", ""),
        row("lengths-are-not-weighted", "self._norms[i] += weight * (scale * norm)", "self._norms[i] += scale * norm"),
        row(
            "embeddings-are-merged-like-all-else",
            "_merge_of(t, outer[t.spec.role].merge)",
            '_merge_of(t, outer["dense"].merge)',
        ),
        row(
            "vectors-are-matrices",
            "if rule == MergeRule.ISO and not tensor.is_matrix else rule",
            "if rule == MergeRule.ISO and len(spec.shape) != 2 and not spec.shape else rule",
        ),
        row(
            "what-is-named-a-vector-is-isotropic-too",
            "msgspec.structs.replace(dense, merge=MergeRule.RDA) if dense.merge == MergeRule.ISO else dense",
            "dense",
        ),
        row(
            "iso-cancels-by-weights-alone",
            "whole = self._weights if rule == MergeRule.RDA else self._norms[i]",
            "whole = self._weights",
        ),
        row("iso-keeps-the-length-of-the-factor", "                        norm = kernels.norm(total)\n", ""),
        row(
            "a-commit-forgets-its-blocks",
            "block=rules.iso_block if rules.merge_for(role) == MergeRule.ISO else 0,",
            "block=0,",
        ),
        row(
            "a-state-is-named-without-its-momentum",
            'digests.digest_of((self.version.to_bytes(8, "little"), published, master, momentum))',
            'digests.digest_of((self.version.to_bytes(8, "little"), published, master))',
        ),
        row(
            "a-state-is-named-without-its-version",
            'digests.digest_of((self.version.to_bytes(8, "little"), published, master, momentum))',
            "digests.digest_of((published, master, momentum))",
        ),
        row(
            "snapshots-come-back-in-another-order",
            "State(header.version, published, master, arrays[2 * n :])",
            "State(header.version, published, arrays[2 * n :], master)",
        ),
        row(
            "momentum-survives-a-healing",
            "State(version, published, published, np.zeros_like(published))",
            "State(version, published, published, published.copy())",
        ),
        row(
            "only-the-master-has-to-be-finite",
            "finite=not broken and kernels.all_finite(published),",
            "finite=not broken,",
        ),
        row(
            "nobody-asks-whether-the-master-is-finite",
            "finite=not broken and kernels.all_finite(published),",
            "finite=kernels.all_finite(published),",
        ),
        row(
            "digests-of-a-crew-are-in-another-order",
            "found[0] if self.is_published else found[2], found[1])",
            "found[0] if self.is_published else found[1], found[1])",
        ),
        argued(
            "the-momentum-may-be-infinite",
            "if not (kernels.all_finite(master) and kernels.all_finite(momentum)):",
            "if not kernels.all_finite(master):",
            "the new master has the new momentum in it, times a rate above 0: where that is infinite or NaN, so is the "
            "master (with momentum 0 it is 0 · ∞, a NaN)",
        ),
    ),
    *of(
        "kernels/matrices.py",
        "tests/unit/test_polar.py",
        row("a-product-starts-anew-in-each-block", "                if l0 > 0:\n", "                if l0 > _DEPTH:\n"),
        row("columns-beyond-the-last-block-are-left", "width = min(_WIDTH, n - j0)", "width = min(_WIDTH, n - j0 - 1)"),
        row("the-order-of-a-sum-is-another", "                    q += 4\n", "                    q += 8\n"),
        row(
            "multiplied-then-added",
            "        return builder.fma(*arguments)",
            "        return builder.fadd(builder.fmul(arguments[0], arguments[1]), arguments[2])",
        ),
        row("mirrored-from-above", "x[j, i] = x[i, j]", "x[i, j] = x[j, i]"),
    ),
    *of(
        "kernels/vectors.py",
        "tests/unit/test_polar.py tests/unit/test_rounding.py tests/unit/test_merge.py",
        row(
            "lanes-are-folded-one-by-one",
            "((first + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))",
            "first + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7]",
        ),
        row("sums-are-not-folded-by-block", "NORM_BLOCK = 4096", "NORM_BLOCK = 8192"),
        row(
            "products-are-rounded-too",
            "np.float64(total[i]) + coefficient * np.float64(x[i]))",
            "np.float64(total[i]) + np.float64(np.float32(coefficient * np.float64(x[i]))))",
        ),
        row("momentum-without-nesterov", "rate * (gradient + mu * b)", "rate * b"),
    ),
    *of(
        "kernels/formats.py",
        "tests/unit/test_rounding.py tests/unit/test_codecs.py",
        row(
            "bfloat16-rounds-half-up",
            "high = np.uint32(np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))",
            "high = np.uint32(np.uint32(b + np.uint32(0x8000)) >> np.uint32(16))",
        ),
        row(
            "a-sign-makes-a-magnitude-larger",
            "_MAGNITUDE = np.uint32(0x7FFFFFFF)",
            "_MAGNITUDE = np.uint32(0xFFFFFFFF)",
        ),
        row("a-scale-may-be-denormal", "high < np.uint32(0x0080) else high", "high < np.uint32(0x0001) else high"),
        row("four-bits-begin-at-seven", "_EIGHT = np.uint32(8)", "_EIGHT = np.uint32(7)"),
        argued(
            "a-level-may-be-out-of-range",
            "_bits_of(np.float32(min(max(value, -levels), levels) + _ROUND))",
            "_bits_of(np.float32(value + _ROUND))",
            "rounded to bfloat16 a scale is at most 2⁻⁹ too small, so no level is beyond 127.25, which rounds to 127",
        ),
    ),
    *of(
        "codecs/packed.py",
        "tests/unit/test_packed.py",
        row(
            "each-piece-is-the-first-one",
            "code.decode_part(data, n, at.start, part)",
            "code.decode_part(data, n, 0, part)",
        ),
        row(
            "what-is-dropped-is-what-is-sent",
            "add(code, piece, -1.0, left, left, crew)",
            "add(code, piece, 1.0, left, left, crew)",
        ),
        row("what-was-before-is-forgotten", "if before is not after:", "if False:"),
        row(
            "the-last-piece-is-not-measured",
            "crew.share(work, pieces(n), SHARE)",
            "crew.share(work, pieces(n) - 1, SHARE)",
        ),
        row(
            "squares-overwrite-each-other",
            "block = at.start // kernels.NORM_BLOCK",
            "block = (at.start - first * PIECE) // kernels.NORM_BLOCK",
        ),
    ),
    *of(
        "codecs/__init__.py",
        "tests/unit/test_rounding.py tests/unit/test_codecs.py",
        row(
            "tensors-are-packed-without-padding",
            "        at += aligned(size)\n",
            "        at += size\n",
        ),
        row("pieces-are-aligned-to-two-bytes", "_ALIGN = 4", "_ALIGN = 2"),
        row(
            "any-number-of-bytes",
            "if code.exact and data.size != packed_size(code, fragment):",
            "if code.exact and data.size < packed_size(code, fragment):",
        ),
    ),
    *of(
        "codecs/__init__.py",
        "tests/unit/test_rate.py",
        row("what-follows-a-packed-fragment-is-ignored", "    if at != data.size:", "    if at > data.size:"),
    ),
    *of(
        "codecs/rate.py",
        "tests/unit/test_rate.py",
        row("small-tensors-have-tables", "SMALL = 4096", "SMALL = 2"),
        row("a-step-is-chosen-on-one-block", "every = max(1, n // SAMPLE)", "every = n"),
        row(
            "bad-streams-are-decoded",
            "        if wrong != kernel.OK:",
            "        if wrong not in (kernel.OK, kernel.STREAM):",
        ),
    ),
    *of(
        "kernels/rate.py",
        "tests/unit/test_rate.py",
        row("tables-cost-nothing", "if found + overhead <= bits:", "if found <= bits:"),
        row("signs-cost-nothing", "+ (total - counts[0])) / total, top", ") / total, top"),
        row("levels-beyond-the-last-wrap", "least = largest / LEVELS", "least = 0.0"),
        row("rare-symbols-have-no-place", "out[s] = max(1, counts[s] * TOTAL // n)", "out[s] = counts[s] * TOTAL // n"),
        row("a-stream-may-end-anywhere", "return OK if at == stop and a == _LOW", "return OK if a == _LOW"),
        row("states-may-end-anywhere", "and a == _LOW and b == _LOW and c == _LOW and d == _LOW else", "else"),
        row("negative-centroids", ">> 23) >= 0xFF:", ">> 23) & 0xFF == 0xFF:"),
        row(
            "tables-of-any-sum",
            "    if total != TOTAL:\n        return TABLE, 0",
            "    if total > TOTAL:\n        return TABLE, 0",
        ),
        row("padding-of-anything", "        if data[rest] != 0:", "        if False:"),
        row(
            "means-of-magnitudes-forget-the-negative",
            "(total[2 * level - 1] - total[2 * level]) / n",
            "2 * total[2 * level - 1] / n",
        ),
    ),
    *of(
        "codecs/base.py",
        "tests/unit/test_packed.py",
        row("pieces-are-no-blocks-of-a-norm", "PIECE = 1 << 16", "PIECE = 3 << 9"),
    ),
    *of(
        "codecs/base.py",
        "tests/unit/test_rounding.py tests/unit/test_codecs.py",
        row("a-block-more-where-none-is-begun", "return -(-n // BLOCK)", "return n // BLOCK + 1"),
    ),
    *of(
        "codecs/int8.py",
        "tests/unit/test_rounding.py tests/unit/test_codecs.py",
        row("scales-of-one-byte", "return 2 * blocks(n) + n", "return blocks(n) + n"),
    ),
    *of(
        "learner/residuals.py",
        "tests/integration/test_residuals.py",
        row("halves-where-any-parameter-has-four-bytes", "return all(t.spec.dtype", "return any(t.spec.dtype"),
    ),
    # --- records ------------------------------------------------------------------------------------------------------
    *of(
        "records/frame.py",
        "tests/unit/test_frame_limits.py tests/unit/test_records.py",
        row("headers-are-not-checked", "if zlib.crc32(raw) != PREFIX.unpack_from(view)[5]:", "if False:"),
        row("padding-may-hold-anything", "if any(view[PREFIX.size + header_size + 32 * pieces : start]):", "if False:"),
        row(
            "too-long-is-too-short",
            "reason = Reason.TRUNCATED if len(blob) < start + payload_size",
            "reason = Reason.TRUNCATED if len(blob) > start + payload_size",
        ),
        row(
            "the-longest-header-is-too-long",
            "if header_size > HEADER_MAX[kind]:",
            "if header_size >= HEADER_MAX[kind]:",
        ),
        row("no-header-is-too-long", "if header_size > HEADER_MAX[kind]:", "if False:"),
        row(
            "an-empty-line-before-the-payload",
            "return -(-(PREFIX.size + size) // ALIGN) * ALIGN",
            "return ((PREFIX.size + size) // ALIGN + 1) * ALIGN",
        ),
        row(
            "signatures-are-ignored",
            "if (author == UNSIGNED_AUTHOR) != (signature == UNSIGNED_SIGNATURE):",
            "if False:",
        ),
        row("half-a-head-is-read", "if len(blob) < PREFIX.size + header_size:", "if len(blob) < header_size:"),
    ),
    *of(
        "records/frame.py",
        "tests/unit/test_pieces.py",
        row(
            "the-last-piece-is-forgotten",
            "return -(-payload_size // piece) if piece else 0",
            "return payload_size // piece if piece else 0",
        ),
        row(
            "pieces-of-any-kind",
            "if piece and (kind not in PIECED or not PIECE_LEAST <= piece <= PIECE_MOST):",
            "if piece and not PIECE_LEAST <= piece <= PIECE_MOST:",
        ),
        row(
            "pieces-of-any-size",
            "if piece and (kind not in PIECED or not PIECE_LEAST <= piece <= PIECE_MOST):",
            "if piece and kind not in PIECED:",
        ),
    ),
    *of(
        "store/checked.py",
        "tests/unit/test_pieces.py",
        row(
            "pieces-are-believed",
            "if len(blob) != len(place) or digests.digest(blob) != digest:",
            "if len(blob) != len(place):",
        ),
        row("a-long-head-is-cut", "if table is not None and table.start > len(head) == HEAD_BYTES:", "if False:"),
        row(
            "more-than-is-allowed-is-read",
            "if table is not None and table.start + table.size > at_most:",
            "if False:",
        ),
        row("all-of-it-is-read", "if first is None or piece[0] < first]", "]"),
    ),
    *of(
        "records/keys.py",
        "tests/unit/test_frame_limits.py",
        row("whatever-begins-like-a-key", "_VERSIONED.fullmatch(key)", "_VERSIONED.match(key)"),
    ),
    *of(
        "records/fields.py",
        "tests/unit/test_frame_limits.py tests/unit/test_records.py",
        row("a-name-may-end-a-line", '._-]{0,62}\\Z"', '._-]{0,62}$"'),
    ),
    # --- rounds -------------------------------------------------------------------------------------------------------
    *of(
        "rounds/grace.py",
        "tests/unit/test_rounds_told.py tests/unit/test_rounds.py",
        row(
            "slack-without-the-way-down",
            "slack = overlap * terms.fastest_step_s - (quorum_s + terms.sync_s)",
            "slack = overlap * terms.fastest_step_s - quorum_s",
        ),
    ),
    *of(
        "rounds/rounds.py",
        "tests/unit/test_rounds_told.py tests/unit/test_rounds.py",
        row(
            "what-is-being-fetched-is-not-waited-for",
            "(here - absent) | {learner for learner, _ in self._fetching}",
            "here - absent",
        ),
        row(
            "a-round-gives-up-before-anything-can-come",
            "first_by = 0.0 if r.arrived else",
            "first_by = 0.0 if True else",
        ),
        row(
            "a-base-just-ahead-is-made-up",
            "if pointer.base > self.head + AHEAD_MAX:",
            "if pointer.base >= self.head + AHEAD_MAX:",
        ),
        row(
            "fewer-tokens-replace-more",
            "known is not None and known.rank > pointer.rank:",
            "known is not None and known.rank < pointer.rank:",
        ),
        row(
            "pointers-without-end",
            "elif reason is None and known is None and len(self._waiting) >= POINTERS_MAX:",
            "elif False:",
        ),
        row(
            "staleness-is-exclusive",
            "if pointer.base < self.head - self._pace.staleness:",
            "if pointer.base <= self.head - self._pace.staleness:",
        ),
        row("what-was-refused-is-fetched-again", "if pointer.digest in self._refused:", "if False:"),
        row(
            "late-work-makes-a-quorum",
            "if self.phase is Phase.OPEN and len(r.fresh) >= r.quorum:",
            "if self.phase is Phase.OPEN and len(r.arrived) >= r.quorum:",
        ),
        row(
            "a-call-at-every-look",
            "            r.called_at = now\n            return [CallRound",
            "            return [CallRound",
        ),
        row(
            "what-is-overdue-is-not-due",
            "return max(now, min(times))",
            "return min((at for at in times if at > now), default=None)",
        ),
        row(
            "grace-never-ended-a-round",
            "over = self.phase is Phase.GRACE and last > self._grace_ends(r)",
            "over = False",
        ),
        row(
            "what-was-left-over-is-forgotten",
            "leftover = list(self.round.arrived.values()) if self.round else []",
            "leftover: list[Pointer] = []",
        ),
        row(
            "one-commit-is-remembered",
            "{given.learner for given in commit.inputs}][-2:]",
            "{given.learner for given in commit.inputs}][-1:]",
        ),
        row("anybody-takes-anybodys-place", "(not final or p[0] == pointer.learner)]", "True]"),
        row(
            "duplicates-come-first",
            "order.append((place[2] not in FINAL, turns[place[0]], place))",
            "order.append((False, turns[place[0]], place))",
        ),
        row(
            "merging-takes-no-time",
            "return replace(terms, sync_s=terms.sync_s + self._close_to_commit_s)",
            "return terms",
        ),
        row("one-heard-is-everybody", "return ends if len(r.fresh) > 1 else", "return ends if len(r.fresh) > 0 else"),
        row(
            "anything-there-is-accepted", "return self._waiting.get(place) is pointer", "return place in self._waiting"
        ),
        row(
            "a-pass-for-any-round",
            "if self.round is not None and version == self.head + 1 and learner",
            "if self.round is not None and learner",
        ),
        argued(
            "merged-bases-are-forgotten-a-version-early",
            "oldest = commit.version - self._pace.staleness - 1",
            "oldest = commit.version - self._pace.staleness",
            "the one base that is forgotten earlier is stale from this commit on, and staleness is judged first",
        ),
    ),
    *of(
        "rounds/members.py",
        "tests/unit/test_members_heard.py tests/unit/test_members.py tests/unit/test_bounds.py",
        row("any-age-of-silence-is-long", "before = now - FORGET_SILENCES * self._pace.silence_s", "before = now"),
        row("the-silent-are-waited-for", "if since >= silent_before:", "if True:"),
        row(
            "a-gap-makes-everybody-silent",
            "        self._deaf_before = now\n        self.hold_until",
            "        self.hold_until",
        ),
        row(
            "a-late-word-brings-back-who-left",
            "if self._left.get(learner, -1) >= incarnation:",
            "if self._left.get(learner, -1) > incarnation:",
        ),
        row(
            "a-new-life-has-the-old-ones-durations",
            "if member is None or member.incarnation < incarnation:",
            "if member is None:",
        ),
        row("silence-begins-at-l", "if m.heard_at >= silent_before}", "if m.heard_at > silent_before}"),
        row(
            "its-word-counts-more-than-what-was-measured",
            "m.answer_s or self._believed(m, m.upload_s, upload_s)",
            "self._believed(m, m.upload_s, upload_s) or m.answer_s",
        ),
        row("an-old-farewell-counts", "if member is None or member.incarnation <= incarnation:", "if True:"),
        row(
            "its-own-farewell-does-not-count",
            "if member is None or member.incarnation <= incarnation:",
            "if member is None or member.incarnation < incarnation:",
        ),
        row("those-that-left-are-kept-for-ever", "while len(self._left) > LEFT_MAX:", "while False:"),
        row("the-cap-is-of-all-that-are-expected", "upload_s) for m in late)", "upload_s) for m in found)"),
        row("nobody-the-log-knows-is-left-out", "if name in here or name in self._left:", "if name in here:"),
        row(
            "of-whom-nothing-came-is-believed-as-much",
            "self._bounds.slow if member.step_most_s else self._bounds.fast)",
            "self._bounds.slow)",
        ),
        row(
            "a-step-is-longer-than-what-came-had-time-for",
            "most = self._bounds.fast * member.step_most_s if member.step_most_s else math.inf",
            "most = math.inf",
        ),
    ),
    # --- what learners send -------------------------------------------------------------------------------------------
    *of(
        "log/updates.py",
        "tests/unit/test_update_opened.py",
        row("any-base", "if header.base != base:", "if header.base > base:"),
        row("any-author", "if header.learner != learner:", "if False:"),
        row("any-run", "if header.run != run.digest:", "if False:"),
        row(
            "any-fragment",
            "if (header.fragment, header.codec) != (fragment.index, run.rules.codec_up):",
            "if header.codec != run.rules.codec_up:",
        ),
        row("any-digest", "if frame.digest(blob) != digest:", "if False:"),
        row("nan-is-a-number", "if not math.isfinite(gradient.norm):", "if False:"),
        row("any-length", "if gradient.norm > GRADIENT_NORM_MAX:", "if False:"),
    ),
    *of(
        "syncer/fetcher.py",
        "tests/unit/test_keeper_claims.py",
        row(
            "what-was-announced-is-not-compared",
            "if (update.header.steps, update.header.tokens) != (pointer.steps, pointer.tokens):",
            "if False:",
        ),
        row(
            "steps-are-not-compared",
            "if (update.header.steps, update.header.tokens) != (pointer.steps, pointer.tokens):",
            "if update.header.tokens != pointer.tokens:",
        ),
        row("a-larger-object-is-not-noticed", "pointer.key, pointer.size + 1, cut", "pointer.key, pointer.size, cut"),
        row("a-refused-update-ends-the-syncer", "return None, Reason.UNREADABLE\n", "raise\n"),
        row("a-refused-syncer-blames-its-learners", "if not await self._is_refused():", "if True:"),
    ),
    *of(
        "syncer/recorder.py",
        "tests/unit/test_keeper_claims.py",
        row("durations-without-bounds", "return min(max(0.0, seconds), SECONDS_MAX)", "return max(0.0, seconds)"),
    ),
    *of(
        "syncer/follower.py",
        "tests/unit/test_keeper_claims.py",
        row("two-commits-are-all-that-is-known", "self.keep = max(2, pace.staleness + 1)", "self.keep = 2"),
    ),
    *of(
        "syncer/snapshots.py",
        "tests/unit/test_keeper_claims.py",
        row(
            "all-fragments-write-snapshots-at-once",
            "by_versions = (version + self._fragment.index) % self._pace.snapshot_every == 0",
            "by_versions = version % self._pace.snapshot_every == 0",
        ),
    ),
    *of(
        "syncer/follower.py",
        "tests/unit/test_takeover.py",
        row("what-is-stuck-is-kept", "        if self._folding:  # what", "        if False:  # what"),
        row("folds-that-fail-do-not-count", "            self._failed += 1\n", "            pass\n"),
    ),
    *of(
        "syncer/keeper.py",
        "tests/unit/test_takeover.py",
        row(
            "what-was-folded-counts-twice",
            "self._snapshots.merged, self._follower.folded =",
            "_, self._follower.folded =",
        ),
    ),
    *of(
        "syncer/snapshots.py",
        "tests/unit/test_takeover.py",
        row(
            "snapshots-follow-versions-alone",
            "return by_versions or self.merged >= self._after",
            "return by_versions or self.merged < self._after",
        ),
    ),
    *of(
        "syncer/follower.py",
        "tests/integration/test_holders.py::test_of_what_another_keeps_a_syncer_reads_the_commits_alone_until_it_takes_over",
        row("everyone-folds-everything", "return self.wanted or bool(self.broken) or", "return True or"),
    ),
    *of(
        "syncer/agent.py",
        "tests/unit/test_takeover.py",
        row("a-share-is-folded-the-moment-it-comes", "if now < came_at + wait_s}", "if wait_s < 0.0}"),
    ),
    *of(
        "log/merge.py",
        "tests/unit/test_feedback.py",
        row("what-is-given-up-is-kept", "master if feedback else published", "master"),
        row("versions-are-shortened", "round_.crew, whole=not feedback)", "round_.crew)"),
        row("every-snapshot-has-a-master", "(() if state.is_published else (state.master,))", "(state.master,)"),
    ),
    *of(
        "learner/parts.py",
        "tests/unit/test_parts.py",
        row(
            "a-piece-is-not-checked",
            "if len(blob) != lies.size or digests.digest(blob) != lies.digest:",
            "if len(blob) != lies.size:",
        ),
        row(
            "every-piece-is-fetched",
            "if any(a >= b for a, b in zip(begin, end, strict=True)):",
            "if len(begin) > 9:",
        ),
        row("heads-are-believed", "if digests.digest(head) != part.digest:", "if not head:"),
        row(
            "parts-may-leave-gaps",
            "if not inside or sum(p.size for p in pieces) != spec.size:",
            "if not inside:",
        ),
        row(
            "pieces-may-lie-outside",
            "if not inside or sum(p.size for p in pieces) != spec.size:",
            "if sum(p.size for p in pieces) != spec.size:",
        ),
    ),
    *of(
        "log/gc.py",
        "tests/unit/test_collect_plan.py",
        row("parts-stay", "if _stand(e.key) not in kept)", "if not _stand(e.key))"),
        row("all-parts-go", "if _stand(e.key) not in kept)", "if _stand(e.key))"),
    ),
    *of(
        "owners/asked.py",
        "tests/integration/test_owners.py",
        row("strangers-are-heard", "not is_secret(hello.secret, self._secret)", "not hello.secret"),
        row("who-is-lost-is-asked-on", "            raise self._lost\n", "            pass\n"),
    ),
    *of(
        "owners/served.py",
        "tests/integration/test_owners.py",
        row("bytes-are-told-twice", "before, self._told = self._told, (up, down)", "before = self._told"),
    ),
    *of(
        "owners/shelf.py",
        "tests/integration/test_owners.py",
        row("what-is-forgotten-comes-all-the-same", "if number in self._forgotten:", "if number < 0:"),
    ),
    *of(
        "pytorch/device.py",
        "tests/integration/test_device.py",
        row("rounding-is-local-work", "before = before.to(values.dtype).float()", "before = before.float()"),
        row("what-was-dropped-is-all-there-was", "                        gradient -= said\n", ""),
        row(
            "a-version-stays-on-the-device",
            "    if isinstance(held, Staged):\n        held.block = None",
            "    return",
        ),
        row("not-finite-is-sent", "if not bool(torch.isfinite(gradient).all()):", "if gradient is None:"),
    ),
    *of(
        "pytorch/device_codecs.py",
        "tests/unit/test_device_codecs.py",
        row("halves-are-swapped", "(low | (high << 4))", "(high | (low << 4))"),
        row("small-scales-stay", "scales.float() < _SMALLEST", "scales.float() < 0.0"),
    ),
    *of(
        "learner/steward.py",
        "tests/unit/test_boundary_uploads.py tests/unit/test_boundary.py",
        row(
            "rounding-is-local-work",
            "(rounded(base, fragment.tensors) if since is None else since)",
            "(base if since is None else since)",
        ),
    ),
    *of(
        "learner/steward.py",
        "tests/unit/test_uplink_settles.py",
        row(
            "an-update-with-the-wrong-sign",
            "kernels.subtract(rounded(base, fragment.tensors), values, gradient)",
            "kernels.subtract(values, rounded(base, fragment.tensors), gradient)",
        ),
        row(
            "updates-are-written-over",
            "await self.log.store.create(key, parcel.body)",
            "await self.log.store.put(key, parcel.body)",
        ),
        row("nothing-is-fed-back", "            kernels.add(gradient, feedback, gradient)\n", "            pass\n"),
        row("updates-are-shortened", "whole=not self._run.rules.error_feedback)", "whole=False)"),
        row(
            "a-polar-factor-of-any-length", "kernels.scale(level, before / after, difference)", "difference[:] = level"
        ),
        row(
            "zeros-are-divided-by",
            "        if after > 0.0:\n            kernels.scale",
            "        if True:\n            kernels.scale",
        ),
    ),
    *of(
        "rules.py",
        "tests/unit/test_uplink_settles.py",
        row(
            "embeddings-are-sent-isotropically",
            "return self.isotropic_up and role == TensorClass.DENSE",
            "return self.isotropic_up",
        ),
    ),
    *of(
        "log/select.py",
        "tests/integration/test_donors.py",
        row(
            "checkpoints-go-by-step-whatever-life", '(int(e.key.split("/")[2]), version_in(e.key))', "version_in(e.key)"
        ),
    ),
    *of(
        "learner/history.py",
        "tests/integration/test_donors.py",
        row(
            "the-oldest-donor-first",
            "key=lambda e: e.modified, reverse=True)[:DONORS_MAX]",
            "key=lambda e: e.modified)[:DONORS_MAX]",
        ),
        row("anybody-is-a-donor", "if name != learner and name in among", "if name != learner"),
    ),
    *of(
        "pytorch/moments.py",
        "tests/integration/test_donors.py",
        row("the-samplers-state-moves-on", "copy.deepcopy(self._data.state_dict())", "self._data.state_dict()"),
    ),
    *of(
        "learner/uplink.py",
        "tests/unit/test_uplink_settles.py",
        row(
            "what-is-on-its-way-is-sent-again",
            "self.taken[p][base], self.residuals[p] = self.residuals[p], None",
            "self.taken[p][base] = self.residuals[p]",
        ),
        row(
            "an-unknown-residual-is-kept",
            '            self.residuals[p], self.residual_of[p] = None, ""\n',
            "            pass\n",
        ),
        row(
            "any-unknown-residual-is-dropped",
            "elif merged.incarnation != self.incarnation and p not in self._own_feedback:",
            "else:",
        ),
        row(
            "a-base-expires-a-version-early",
            "for base in [b for b in self.accounts[p].sent if version - b > self._pace.staleness]:",
            "for base in [b for b in self.accounts[p].sent if version - b >= self._pace.staleness]:",
        ),
        row(
            "what-was-packed-expires-a-version-early",
            "for base in [b for b in self._packed[p] if version - b > self._pace.staleness]:",
            "for base in [b for b in self._packed[p] if version - b >= self._pace.staleness]:",
        ),
        row(
            "what-was-carried-comes-back-too-early",
            "self._put_back(p, version - self._pace.staleness)",
            "self._put_back(p, version - self._pace.staleness + 1)",
        ),
        row(
            "any-rejection-on-a-base-closes-it",
            "and turned.reason in FINAL and turned.digest == attempt.digest:",
            "and turned.reason in FINAL:",
        ),
        row(
            "a-call-is-answered-with-the-next-one",
            "sent = self.attempts[fragment].get(version - 1)",
            "sent = self.attempts[fragment].get(version)",
        ),
        row(
            "a-call-is-answered-whenever",
            "if sent is not None and self._runtime.now() - sent.said_at > self._pace.heartbeat_s / 4:",
            "if sent is not None:",
        ),
        row("the-oldest-is-said-again", "newest = attempts[max(attempts)]", "newest = attempts[min(attempts)]"),
        row(
            "a-failure-forgets-the-update-before-it",
            "account.unsend(base, earlier.header.tokens if earlier else None)",
            "account.unsend(base, None)",
        ),
        row("one-turn-for-all-that-wait", "        while self.window.full:\n", "        if self.window.full:\n"),
        row("nobody-says-that-the-wire-is-free", "            self._freed.set()\n", ""),
        row("older-bases-stay-open", "for base in [b for b in account.sent if b < given.base]:", "for base in []:"),
    ),
    *of(
        "learner/boundary.py",
        "tests/unit/test_boundary_uploads.py tests/unit/test_boundary.py",
        row("who-waits-adopts-no-more-than-others", "while self.overdue() and (into", "while False and (into"),
        row(
            "a-failed-upload-takes-local-work-along",
            "                        slot.sent_values = None if sent_step is None else slot.prior_values\n",
            "",
        ),
        row(
            "a-failure-on-a-base-that-is-gone",
            "                    if slot.base == base:\n                        # Taken again",
            "                    if True:\n                        # Taken again",
        ),
        row(
            "too-far-behind-a-version-early",
            "if behind > self._staleness or slot.merged",
            "if behind >= self._staleness or slot.merged",
        ),
        row(
            "a-merged-base-is-answered",
            "if behind > self._staleness or slot.merged or",
            "if behind > self._staleness or",
        ),
        row(
            "an-evaluation-is-a-step",
            "self.step_s = statistics.median(self._durations)",
            "self.step_s = statistics.fmean(self._durations)",
        ),
        row("whoever-was-sent-last-goes-first", "_, _, p = min(wanting)", "_, _, p = max(wanting)"),
        row(
            "the-newest-is-replaced-first",
            "return min(ready)[1] if ready else None",
            "return max(ready)[1] if ready else None",
        ),
        row("rounds-to-come-lie-in-the-past", "(last - version) * self._round_s", "(version - last) * self._round_s"),
        row(
            "an-upload-takes-no-time",
            "return now + self._window.upload_s + LATE_STEPS * self.step_s > closes_at",
            "return now + LATE_STEPS * self.step_s > closes_at",
        ),
        row(
            "what-was-sent-is-kept-twice",
            "slot.origin_step, slot.origin_tokens = slot.sent_step, slot.sent_tokens",
            "pass",
        ),
        row(
            "local-work-is-replaced-unsent",
            "slot.ready.version - slot.base <= self._staleness",
            "slot.ready.version - slot.base < self._staleness",
        ),
    ),
    *of(
        "learner/upload_window.py",
        "tests/unit/test_upload_window.py",
        row("one-more-whenever", "(in_hand == self.limit and self.free_at <= now + step_s)", "(in_hand == self.limit)"),
        row(
            "never-one-more",
            "return in_hand < self.limit or (in_hand == self.limit and self.free_at <= now + step_s)",
            "return in_hand < self.limit",
        ),
        row("a-failure-is-a-measurement", "if stored and now > began_at:", "if now > began_at:"),
        row("only-those-that-were-there-count", "max(beside, len(self._under_way) + 1))", "beside)"),
        row(
            "too-much-is-tried-again-and-again",
            "self._patience = min(TRIES_MAX, 2 * self._patience)",
            "self._patience = min(TRIES_MAX, self._patience)",
        ),
        row(
            "too-much-is-hardly-tried-again",
            "self._patience = min(TRIES_MAX, 2 * self._patience)",
            "self._patience = 2 * self._patience",
        ),
        row("queues-make-it-grow", "if queued > QUEUED_HIGH and", "if queued < QUEUED_LOW and"),
        row("it-never-grows", "            self.limit += 1\n", ""),
        row("free-when-the-last-is-through", "self.free_at = min(at + size", "self.free_at = max(at + size"),
    ),
    *of(
        "learner/downlink.py",
        "tests/unit/test_downlink_order.py",
        row(
            "a-false-word-is-looked-into-for-ever",
            "            known.wanted = known.version  # said, but not in the log\n",
            "            pass\n",
        ),
        row("whoever-is-least-behind-goes-first", "p = max(behind, key=", "p = min(behind, key="),
        row(
            "whoever-was-brought-last-goes-first",
            "known.wanted - known.version, -known.brought_at",
            "known.wanted - known.version, known.brought_at",
        ),
        row("to-the-end-of-the-log", "await self._leap(p, wanted)", "await self._leap(p, None)"),
        row("always-from-a-snapshot", "if behind * difference > from_snapshot:", "if behind * difference > 0:"),
        row("never-from-a-snapshot", "if behind * difference > from_snapshot:", "if False:"),
        row(
            "silence-is-not-looked-into",
            "                            self.want(p, known.version + 1)\n",
            "                            pass\n",
        ),
        row(
            "what-is-leapt-over-settles-nothing",
            "digest)\n            self._settle(commit)\n",
            "digest)\n",
        ),
        row("two-fetch-the-same", "if k.wanted > k.version and not k.fetching]", "if k.wanted > k.version]"),
        row("a-long-way-is-how-long-one-takes", "if behind == 1:", "if behind >= 1:"),
    ),
    # --- garbage ------------------------------------------------------------------------------------------------------
    *of(
        "log/gc.py",
        "tests/unit/test_collect_plan.py",
        row(
            "a-young-snapshot-is-no-start",
            "    start = min([start, *young])\n",
            "",
        ),
        row("snapshots-go-last", 'key=lambda kind: kind != "snapshots")', 'key=lambda kind: kind == "snapshots")'),
        row("all-kinds-at-once", "for phase in (kinds[:1], kinds[1:]):", "for phase in (kinds,):"),
        row("a-commit-too-young-is-packed", "if version < young]", "if version <= young]"),
        row(
            "the-oldest-base-that-counts-goes",
            "version_in(e.key) < head - STALENESS_MAX or",
            "version_in(e.key) <= head - STALENESS_MAX or",
        ),
        row(
            "values-above-the-head-go",
            "if version_in(e.key) <= head and version_in(e.key) != start",
            "if version_in(e.key) != start",
        ),
        row(
            "the-snapshot-to-start-from-goes",
            "(e for e in snapshots if version_in(e.key) < start)",
            "(e for e in snapshots if version_in(e.key) <= start)",
        ),
        row("one-version-fewer-is-kept", "at_most=max(0, head - keep))", "at_most=max(0, head - keep + 1))"),
        row(
            "what-unpacked-commits-merged-goes",
            "floor = start if packed_to == start - 1 > 0 else packed_to",
            "floor = start",
        ),
        row("one-checkpoint-is-kept", "held[CHECKPOINTS_KEPT:]", "held[CHECKPOINTS_KEPT - 1 :]"),
        row(
            "damage-is-packed",
            "if following is None or frame.digest(blob) != following.header.previous:",
            "if following is None:",
        ),
        row("pointers-do-not-move-on", "        offset += len(blob)\n", ""),
        row(
            "packing-begins-at-the-top",
            "[version for version in reversed(plain) if version < young]",
            "[version for version in plain if version < young]",
        ),
    ),
    # --- what a model is cut into -------------------------------------------------------------------------------------
    *of(
        "layout.py",
        "tests/unit/test_layout.py",
        row("no-tensor-is-cut", "if spec.size > max(limit, CUT_FROM) else 1", "if spec.size < 0 else 1"),
        row("small-tensors-are-cut-too", "if spec.size > max(limit, CUT_FROM) else 1", "if spec.size > limit else 1"),
        row("uneven-is-good-enough", "if not finer or heaviest <= BALANCED * mean or limit <= PIECE_MIN:", "if best:"),
        row("a-fragment-may-be-empty", "if sorted(tensors) != list(range(len(tensors))):", "if not tensors:"),
        row("every-piece-begins-at-the-first-row", "return 0 if self.rows is None else self.rows[0] *", "return 0 *"),
        row("rows-may-be-missing", "if sum(rows for _, rows in cuts) != height:", "if not cuts:"),
    ),
    *of(
        "pytorch/shards.py",
        "tests/unit/test_shards.py",
        row("overlaps-are-no-matter", "if not (apart and inside and", "if not (inside and"),
        row("gaps-are-no-matter", "and sum(p.block.size for p in found) == prod(shape)):", "):"),
        row("the-last-replica-gives", "first.setdefault(blocks[rank], rank)", "first[blocks[rank]] = rank"),
        row(
            "empty-blocks-are-pieces",
            "        if blocks[rank].size:\n            first",
            "        if True:\n            first",
        ),
    ),
    *of(
        "pytorch/ranks.py",
        "tests/unit/test_shards.py",
        row("any-dimension-is-a-shard", "if dimension in REFUSED:", "if dimension in ():"),
        row("one-long-is-several", "            if size > 1:\n", "            if size > 0:\n"),
        row(
            "some-replicas-are-all",
            "m.process_group.size() < dist.get_world_size() for m",
            "m.process_group.size() < 1 for m",
        ),
    ),
    *of(
        "memory.py",
        "tests/unit/test_memory.py",
        row(
            "what-a-view-shows-is-given-away",
            "array = np.frombuffer(memory, np.uint8)",
            "array = np.frombuffer(memory, np.uint8)[:]",
        ),
        row("all-is-kept", "if self.kept + size <= self.kept_max:", "if True:"),
        row("nothing-is-kept", "if self.kept + size <= self.kept_max:", "if False:"),
        row("nothing-makes-way", "if s != size]:", "if False]:"),
        row("zeros-are-what-was-there", "    found.fill(0.0)\n", ""),
    ),
    # --- the world outside --------------------------------------------------------------------------------------------
    *of(
        "store/bucket.py",
        "tests/unit/test_bucket_answers.py",
        row("a-conflict-means-exists", "if _status(error) == 409:", "if False:"),
        row("a-create-writes-over", "whole, mode=mode, use", 'whole, mode="overwrite", use'),
        row("a-write-is-sent-again", "write=client(0),", "write=client(2),"),
        row(
            "ranges-are-of-any-object",
            'same = {"if_match": first.meta["e_tag"]} if first.meta["e_tag"] else {}',
            "same: dict[str, str] = {}",
        ),
        row("nothing-says-what-the-bytes-are", '                "checksum_algorithm": "SHA256",\n', ""),
        row("a-write-may-hang", "READ_TIMEOUT.total_seconds() + len(data) / WRITE_LEAST", "3600.0"),
        row("no-bucket-is-nothing-to-delete", 'if _code(error) == "NoSuchBucket":', "if False:"),
    ),
    *of(
        "store/bucket.py",
        "tests/conformance/test_bucket_parts.py",
        row("a-large-create-looks-for-nothing", "if len(data) > PART_BYTES and await", "if False and await"),
        row("a-range-begins-where-the-object-does", '{"range": (start + at, start', '{"range": (at, start'),
    ),
    *of(
        "store/refused.py",
        "tests/unit/test_bucket_answers.py tests/unit/test_store_answers.py",
        row("an-unknown-refusal-is-an-outage", "if code in DENIED or status in (401, 403):", "if code in DENIED:"),
        row(
            "a-conflict-means-exists",
            'EXISTS = {"PreconditionFailed", "412"}',
            'EXISTS = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}',
        ),
    ),
    *of(
        "store/credentials.py",
        "tests/unit/test_bucket_answers.py",
        row(
            "endpoints-in-the-other-order",
            'environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")',
            'environment.get("AWS_ENDPOINT_URL") or environment.get("AWS_ENDPOINT_URL_S3")',
        ),
        row("no-session-token", 'environment.get("AWS_SESSION_TOKEN") or None', "None"),
    ),
    *of(
        "store/s3.py",
        "tests/conformance/test_parts.py",
        row("a-part-is-sent-once", "if _is_final(error) or tried == PART_TRIES:", "if True:"),
        row("what-is-there-is-sent-again", 'if begun.parts.get(number, ("", ""))[0] != sum_:', "if True:"),
        row(
            "what-is-there-is-not-looked-at",
            'if begun.parts.get(number, ("", ""))[0] != sum_:',
            "if number not in begun.parts:",
        ),
        row("a-create-in-parts-looks-for-nothing", "if await is_there(self, key):", "if False:"),
        row("an-unknown-upload-is-tried-for-ever", "if passing and not begun.again and", "if passing and"),
        row("ranges-of-a-range-begin-at-0", "if extra else 0\n        same", "if not extra else 0\n        same"),
    ),
    *of(
        "store/s3.py",
        "tests/unit/test_store_answers.py",
        row("ranges-include-their-stop", "bytes={start}-{stop - 1}", "bytes={start}-{stop}"),
        row("half-a-body-is-a-body", "if at != len(data):", "if at > len(data):"),
        row("creating-is-putting", '                IfNoneMatch="*",\n', ""),
    ),
    *of(
        "store/retrying.py",
        "tests/unit/test_store_answers.py",
        row(
            "one-try-more",
            "stop_after_attempt(self._patience.attempts - 1)",
            "stop_after_attempt(self._patience.attempts)",
        ),
        row(
            "pauses-without-end",
            "ceiling_s = min(self._patience.longest_s,",
            "ceiling_s = max(self._patience.longest_s,",
        ),
    ),
    *of(
        "store/limited.py",
        "tests/unit/test_store_answers.py",
        row("waited-for-without-end", "asyncio.timeout(self._request_s)", "asyncio.timeout(None)"),
    ),
    *of(
        "store/watched.py",
        "tests/unit/test_store_answers.py",
        row(
            "no-such-object-is-no-answer",
            "        except (ObjectMissing, Denied):\n            self._outage.answered()\n            raise\n",
            "        except (ObjectMissing, Denied):\n            raise\n",
        ),
        row(
            "hung-since-the-last-one-was-sent",
            "max(min(self._open.values()), self.answered_at or 0.0)",
            "max(max(self._open.values()), self.answered_at or 0.0)",
        ),
        row(
            "hung-whatever-was-answered",
            "max(min(self._open.values()), self.answered_at or 0.0)",
            "min(self._open.values())",
        ),
        row(
            "down-since-the-last-try",
            "        if self._down_since is None:\n            self._down_since",
            "        if True:\n            self._down_since",
        ),
    ),
    *of(
        "store/measured.py",
        "tests/integration/test_vitals.py",
        row(
            "only-answers-with-bytes-are-measured",
            "        self._answered(operation, started)\n        return result",
            "        return result",
        ),
    ),
    *of(
        "store/atomic.py",
        "tests/unit/test_store_answers.py",
        row("two-winners-are-one-too-few", "if len(winners) > 1:", "if len(winners) > 2:"),
        row("what-was-tried-is-left-there", "        raise\n    await store.delete(key)\n", "        raise\n"),
    ),
    *of(
        "store/files.py",
        "tests/unit/test_store_answers.py",
        row(
            "creating-is-replacing",
            "return await self._run(key, self._write, data, os.link)",
            "return await self._run(key, self._write, data, os.replace)",
        ),
        row("bytes-are-on-disk-some-time", "                os.fsync(file.fileno())\n", ""),
        row(
            "names-are-on-disk-some-time",
            "            _sync_folder(path.parent)\n            return True",
            "            return True",
        ),
        row("ranges-begin-at-the-beginning", "            file.seek(start)\n", ""),
        row(
            "in-the-order-of-the-folder",
            "return sorted(Entry(str(p.relative_to(self.root)), s.st_size, s.st_mtime) for p, s in _walk(path))",
            "return [Entry(str(p.relative_to(self.root)), s.st_size, s.st_mtime) for p, s in _walk(path)]",
        ),
    ),
    *of(
        "bus/redis.py",
        "tests/unit/test_bus_listening.py",
        row(
            "ids-are-text",
            "if newest is None or _order(newest) < _order(after[key]):",
            "if newest is None or newest < after[key]:",
        ),
        row(
            "back-beyond-the-end", "START if at is None else min(at, then, key=_order)", "START if at is None else then"
        ),
        row(
            "back-means-to-the-end",
            "START if at is None else min(at, then, key=_order)",
            "START if at is None else max(at, then, key=_order)",
        ),
    ),
    *of(
        "bus/sqlite.py",
        "tests/unit/test_bus_listening.py",
        row("the-last-message-is-read-again", "AND id > ? ORDER BY id LIMIT ?", "AND id >= ? ORDER BY id LIMIT ?"),
        row(
            "an-emptied-file-is-not-noticed",
            "                start = 0  # the bus lost what we had read\n",
            "                pass\n",
        ),
        row("numbers-begin-at-zero", "for i, body in enumerate(bodies, 1)]", "for i, body in enumerate(bodies)]"),
    ),
    *of(
        "bus/endpoints.py",
        "tests/unit/test_bus_listening.py",
        row(
            "what-was-dropped-takes-another-along",
            "if self._unsaid and self._unsaid[0] is message:",
            "if self._unsaid:",
        ),
        argued(
            "a-word-in-between-is-not-sent",
            "            self._wake.clear()\n            try:\n                await self.flush()\n            except",
            "            try:\n                await self.flush()\n                self._wake.clear()\n            except",
            "flush ends only where nothing is left to be said, and nobody else runs between that and forgetting the word",
        ),
        row(
            "nobody-hears-of-the-gap",
            "                self.down_since = None\n                gap()\n",
            "                self.down_since = None\n",
        ),
        row(
            "what-came-after-comes-before-the-gap",
            "            if self.down_since is not None:\n                self.down_since = None\n                gap()\n            for pair in self._advance(found):\n                yield pair\n",
            "            for pair in self._advance(found):\n                yield pair\n            if self.down_since is not None:\n                self.down_since = None\n                gap()\n",
        ),
        row("streams-that-are-gone-are-read-on", "            self.positions.pop(name, None)\n", "            pass\n"),
        row(
            "positions-are-of-the-first",
            "self.positions[stream] = messages[-1].position",
            "self.positions[stream] = messages[0].position",
        ),
        row("nobodys-words-are-heard", "for message in messages if message.body]", "for message in messages]"),
        row(
            "what-was-refused-is-gone",
            "            except Unavailable:\n                self._wake.set()\n",
            "            except Unavailable:\n",
        ),
    ),
    *of(
        "tolerance.py",
        "tests/unit/test_refusals.py tests/unit/test_tolerance.py",
        row(
            "what-never-worked-is-ridden-out",
            "if not (vouched or kind in self._worked) or now - since >= self._limit_s:",
            "if now - since >= self._limit_s:",
        ),
        row(
            "refusals-are-ridden-out-for-ever",
            "if not (vouched or kind in self._worked) or now - since >= self._limit_s:",
            "if not (vouched or kind in self._worked):",
        ),
        row("nothing-is-vouched-for", "        self._vouched = True\n", "        self._vouched = False\n"),
        row(
            "the-clock-of-a-refusal-never-stops",
            "if self._since.pop(kind, None) is not None:",
            "if self._since.get(kind) is not None:",
        ),
        row("each-refusal-begins-anew", "since = self._since.setdefault(kind, now)", "since = self._since[kind] = now"),
        row(
            "nothing-there-is-no-answer",
            "        except ObjectMissing:\n            self._good(kind)\n            raise\n",
            "        except ObjectMissing:\n            raise\n",
        ),
        row("all-folders-are-one", "return f\"{what} {key.split('/', maxsplit=1)[0]}/\"", "return what"),
        row("creating-is-another-reading", '"put": "write"}', '"put": "write", "create": "read"}'),
        row(
            "what-was-refused-long-ago-still-is",
            "lately = [since for kind, since in self._since.items() if now - self._last[kind] <= LATELY_S]",
            "lately = list(self._since.values())",
        ),
        row(
            "an-update-is-ridden-out",
            '        if operation == "get" and key.startswith(UPDATES):\n            return await send()\n',
            "",
        ),
        row("it-is-said-every-time", "                self._said_at = now\n", ""),
        row(
            "the-shortest-refusal-counts",
            "return now - min(lately, default=now)",
            "return now - max(lately, default=now)",
        ),
    ),
    *of(
        "syncer/fairness.py",
        "tests/unit/test_fair_shares.py tests/unit/test_fairness.py",
        row(
            "the-same-author-again-and-again",
            "        del self._waiting[author]\n        if queue:\n            self._waiting[author] = queue  # behind all others\n",
            "        if not queue:\n            del self._waiting[author]\n",
        ),
        row(
            "the-newest-is-dropped",
            "            queue.popleft()\n            self._size -= 1\n            self._dropped(author)",
            "            queue.pop()\n            self._size -= 1\n            self._dropped(author)",
        ),
        row(
            "what-was-dropped-still-counts",
            "            self._size -= 1\n            self._dropped(author)",
            "            self._dropped(author)",
        ),
        row(
            "a-crowd-is-not-heard",
            "min(self._each, max(1, self._total // len(self._waiting)))",
            "min(self._each, self._total // len(self._waiting))",
        ),
        row("a-crowd-may-fill-everything", "min(self._each, max(1, self._total // len(self._waiting)))", "self._each"),
        row(
            "own-events-in-turn",
            "        if self._own:\n            return self._own.popleft()\n        if not self._waiting:\n",
            "        if self._own and not self._waiting:\n            return self._own.popleft()\n        if not self._waiting:\n",
        ),
        row("the-slow-have-their-share", "(1 if user in self._slow else self._each)", "self._each"),
        row(
            "a-slot-of-a-cancelled-one-is-lost",
            "                    self._give_back(user)\n                else:",
            "                    pass\n                else:",
        ),
        row("those-passed-over-only", "        passed_over.extend(self._waiting)\n", ""),
        row(
            "a-free-slot-is-not-handed-on",
            "            del self._held[user]\n        self._serve()\n",
            "            del self._held[user]\n",
        ),
        row(
            "the-first-that-must-wait-stops-all",
            "                passed_over.append((user, turn))\n",
            "                passed_over.append((user, turn))\n                break\n",
        ),
        row("the-slow-are-remembered-for-ever", "            self._slow.clear()\n", "            pass\n"),
    ),
    # --- readers ------------------------------------------------------------------------------------------------------
    *of(
        "readers/whatif.py",
        "tests/unit/test_whatif_decides.py tests/unit/test_decided_late.py",
        row(
            "late-here-is-late-for-the-next-round",
            "rejected_total={})), closed_at)",
            "rejected_total={})), h.waited.waited_s)",
        ),
        row(
            "the-loop-is-never-busy",
            "self._lag = max((w.waited_s - at for at in due if 0.0 < at <= w.waited_s), default=0.0)",
            "self._lag = 0.0",
        ),
        row(
            "what-misses-its-round-is-forgotten",
            "given |= {i.digest: i for i in h.inputs}",
            "given = {i.digest: i for i in h.inputs}",
        ),
        row(
            "merged-there-is-merged-here",
            "Appended(msgspec.structs.replace(h, inputs=merged, rejected=(), rejected_total={})",
            "Appended(msgspec.structs.replace(h, rejected=(), rejected_total={})",
        ),
        row("who-fell-silent-was-never-there", "            expected.add(seen.learner)\n", "            pass\n"),
        row(
            "rounds-open-at-the-boundary",
            "self._rounds.round.boundary_at, self._rounds.round.gives_up_at = -w.boundary_s, w.gives_up_s",
            "self._rounds.round.gives_up_at = w.gives_up_s",
        ),
        row(
            "a-healing-has-a-round",
            "merged, closed_at = ((), 0.0) if h.healed is not None else _Story(",
            "merged, closed_at = _Story(",
        ),
    ),
    *of(
        "readers/explain.py",
        "tests/unit/test_explain.py",
        row(
            "everything-is-a-version-later",
            "{version - 1 - i.base} version(s) late",
            "{version - i.base} version(s) late",
        ),
    ),
    *of(
        "readers/trace.py",
        "tests/unit/test_trace.py",
        row(
            "versions-point-to-the-training-before",
            "trained.setdefault((h.fragment, i.base), []).append(training)",
            "trained.setdefault((h.fragment, h.version), []).append(training)",
        ),
    ),
    *of(
        "forecast/outcome.py",
        "tests/unit/test_plan_figures.py",
        row(
            "a-month-is-a-day",
            "stored / 1e9 * prices.storage_gb_month / 30.0",
            "stored / 1e9 * prices.storage_gb_month",
        ),
        row(
            "bytes-are-bits",
            "learners * wire.up * 8.0 * rounds_day / DAY_S / 1e9",
            "learners * wire.up * rounds_day / DAY_S / 1e9",
        ),
    ),
    *of(
        "pytorch/frozen.py",
        "tests/unit/test_frozen.py",
        row("scales-are-left-out", "sorted(scales.as_dict(packed=False).items())", "()"),
        row(
            "only-the-first-of-its-tensors",
            "for name in tensor.__tensor_flatten__()[0]:",
            "for name in tensor.__tensor_flatten__()[0][:1]:",
        ),
        row("nobody-is-trusted", "if check == FrozenCheck.TRUSTED:", "if not frozen:"),
    ),
    *of(
        "log/run.py",
        "tests/unit/test_frozen.py",
        row("who-trusts-is-asked-for-bytes", " and UNTOLD not in (frozen[name], self.frozen[name])", ""),
    ),
    *of(
        "following.py",
        "tests/e2e/test_follow.py",
        row("a-cut-is-given-again", "if cut is None or cut is self._given:", "if cut is None:"),
        row("what-is-returned-is-forgotten", "(found or {}).items()", "{}.items()"),
    ),
    *of(
        "pytorch/served.py",
        "tests/e2e/test_follow.py",
        row(
            "more-than-the-run-has-is-left-alone", "        if name not in known:", "        if name not in parameters:"
        ),
        row(
            "shapes-may-differ",
            "if tuple(parameters[name].shape) != tensors[name].shape:",
            "if parameters[name].dim() != tensors[name].ndim:",
        ),
    ),
    *of(
        "readers/follow.py",
        "tests/e2e/test_follow.py",
        row("a-mixture-is-of-the-least", "number = sum(versions.values())", "number = min(versions.values())"),
    ),
    *of(
        "readers/export.py",
        "tests/e2e/test_follow.py",
        row(
            "half-a-tensor-is-one",
            "if 0 < sum(fragment in values for fragment, _ in cuts) < len(cuts):",
            "if len(values) < 0:",
        ),
    ),
    *of(
        "log/evaluations.py",
        "tests/e2e/test_follow.py",
        row("the-earlier-one-counts", "key=lambda p: (p.cut, p.at)", "key=lambda p: (p.cut, -p.at)"),
    ),
    *of(
        "pytorch/dcp.py",
        "tests/e2e/test_exchange.py",
        row("a-block-of-any-size", "if len(words) != prod(shape) * dtype.itemsize:", "if not held:"),
        row("the-whole-checkpoint-is-the-model", "if not name.startswith(below) or", "if not name.startswith('') or"),
    ),
    *of(
        "integrations/hook.py",
        "tests/e2e/test_trainer.py",
        row(
            "the-schedule-sees-the-warm-up",
            "        self._rates = []\n        self._taken += 1",
            "        self._taken += 1",
        ),
        row("warm-up-is-for-ever", '            group["lr"] = lr\n', '            group["lr"] = lr * self.link.rate\n'),
    ),
    *of(
        "integrations/torchtitan.py",
        "tests/e2e/test_torchtitan.py",
        row("schedules-begin-anew", "take_up(schedule, state)", "pass"),
        row("data-begin-anew", 'trainer.dataloader.load_state_dict(state_dict["data"])', "pass"),
    ),
    *of(
        "integrations/lightning.py",
        "tests/e2e/test_lightning.py",
        row("loops-begin-anew", 'self._trainer.fit_loop.load_state_dict(state_dict["fit_loop"])', "pass"),
    ),
    *of(
        "readers/moments.py",
        "tests/unit/test_chronicle.py",
        row("one-moment-too-many", "while number >= self.most:", "while number > self.most:"),
        row("halves-that-are-forgotten", "merged = first + second if", "merged = first if"),
        row(
            "the-first-word-stays",
            "np.where(np.isnan(second), first, second)",
            "np.where(np.isnan(first), second, first)",
        ),
        row("moments-that-do-not-grow", "self.width *= 2.0", "self.width *= 1.0"),
        row(
            "a-moment-that-has-not-ended",
            "return self.over(0, self.whole(at))",
            "return self.over(0, self.whole(at) + 1)",
        ),
        row(
            "before-the-beginning-is-behind-the-end",
            "number = max(0, math.floor((at - self.began) / self.width))\n        while",
            "number = math.floor((at - self.began) / self.width)\n        while",
        ),
    ),
    *of(
        "readers/rows.py",
        "tests/unit/test_chronicle.py",
        row("the-last-written-is-the-newest", "order[np.maximum.accumulate(first)]", "order"),
        row("out-of-order", "self._sorted = False", "pass"),
        row("sums-of-before-it-was-put-in-order", "{name: (min(first, upto), sums) for", "{name: (upto, sums) for"),
        row("not-yet-at-its-own-time", 'self["written_at"], at, side="right"', 'self["written_at"], at, side="left"'),
        row("healing-closes-a-round", "== int(value)) & ~healed)", "== int(value)))"),
        row("an-order-that-is-old", "self._order[0] != self._count:", "False:"),
        row(
            "a-cache-of-other-columns",
            "if column.shape != (count,) or column.dtype",
            "if column.shape != (count,) and column.dtype",
        ),
    ),
    *of(
        "readers/chronicle.py",
        "tests/unit/test_chronicle.py",
        row(
            "each-fragment-counts-in-full",
            "sum(i.tokens for i in h.inputs) * float(self.shares[h.fragment])",
            "sum(i.tokens for i in h.inputs)",
        ),
        row(
            "what-is-lost-and-what-is-not-mixed-up",
            "repeated = sum(h.rejected_total.get(reason, 0) for reason in HARMLESS)",
            "repeated = 0",
        ),
        row("rejections-of-all-versions-each-time", "max(0, rejected - end.rejected)", "max(0, rejected)"),
        row("fresh-is-any-base", "1, i.base == h.version - 1, bool(i.clipped)", "1, True, bool(i.clipped)"),
        row("whatever-was-read-last", "if not i.taken_at < reached[number, _TAKEN_AT]:", "if True:"),
        row(
            "a-life-begins-with-what-was-read-first",
            "life.began, life.step = min(life.began, began), min(life.step, step)",
            "pass",
        ),
        row("another-run-s-cache", "meta.run != run.digest or", ""),
        row("a-cache-of-another-format", "meta.format != FORMAT or", ""),
        row("half-a-file", "        scratch.replace(path)\n", "        scratch.replace(path.with_suffix('.half'))\n"),
        row("a-commit-that-does-not-follow", "assert h.version == end.version + 1", "assert h.version > 0"),
    ),
    *of(
        "readers/views.py",
        "tests/unit/test_chronicle.py tests/integration/test_board.py",
        row("what-came-after-is-of-the-past", "last = moments.whole(at)\n", "last = moments.whole(at) + 1\n"),
        row("as-old-as-another-clock-says", "at if now is None else now\n", "at\n"),
        row(
            "participation-of-those-who-were-missing",
            '_share(count["expected"] - count["missing"], count["expected"])',
            '_share(count["missing"], count["expected"])',
        ),
        row("trained-again-for-nothing", "before.get(n, 0) - found.tokens[0], 0)", "before.get(n, 0), 0)"),
        row("a-round-is-open-after-it-has-closed", "if opened <= at < closed:", "if opened <= at:"),
        row(
            "a-takeover-within-one-fragment-s-first-commit", "(fragments[1:] == fragments[:-1]) & (writers", "(writers"
        ),
        row("takeovers-of-the-future", "& (order[1:] < count)", ""),
        row("the-oldest-first", "matching = chosen[wanted][::-1]", "matching = chosen[wanted]"),
    ),
    *of(
        "readers/scenes.py",
        "tests/unit/test_chronicle.py tests/integration/test_board.py",
        row("asking-makes-room", "c.by_learner.whole(at) + 1]", "c.by_learner.place(at) + 1]"),
        row("it-waits-for-who-has-answered", "- gone - here - answered - passed)", "- gone - here - passed)"),
        row("it-waits-for-who-came-later", "- gone - here - answered - passed)", "- gone - answered - passed)"),
        row("marks-from-the-boundary-on", '("closed", closed, f"closed', '("closed", closed + w.boundary_s, f"closed'),
    ),
    *of(
        "readers/whatif.py",
        "tests/integration/test_board.py",
        row(
            "one-round-after-itself",
            "until=version - 1, keep=max(2, log.run.pace.staleness + 1)",
            "until=version, keep=max(2, log.run.pace.staleness + 1)",
        ),
        row(
            "one-round-as-it-was",
            "result = await fold.combine(log, at.carried, fragment, inputs, settings.outers(h), codec(h.codec_down))",
            "result = await fold.combine(log, at.carried, fragment, inputs, fold.outer_of(h), codec(h.codec_down))",
        ),
    ),
    # --- who may do what ---------------------------------------------------------------------------------------------
    *of(
        "signing/sshsig.py",
        "tests/unit/test_signing.py",
        row("any-key-is-a-key", "if is_small_order(author) or is_small_order(signature[:32]):", "if False:"),
        row("r-is-not-looked-at", "or is_small_order(signature[:32]):", "or False:"),
        row(
            "kinds-are-one",
            'MAGIC + string(namespace) + string(b"") + string(HASH) + string(hashlib',
            'MAGIC + string(b"x") + string(b"") + string(HASH) + string(hashlib',
        ),
    ),
    *of(
        "signing/keys.py",
        "tests/unit/test_signing.py",
        row("others-may-read-it", "and not _is_mounted(path):", "and False:"),
        row("keys-are-written-over", "        if file.exists():\n", "        if False:\n"),
    ),
    *of(
        "records/frame.py",
        "tests/integration/test_signed.py",
        row(
            "the-payload-is-not-signed",
            'return b"".join((head[: _SIGNATURE.start], UNSIGNED_SIGNATURE, head[_SIGNATURE.stop :], payload))',
            'return b"".join((head[: _SIGNATURE.start], UNSIGNED_SIGNATURE, head[_SIGNATURE.stop :]))',
        ),
        row(
            "unsigned-is-anybodys",
            "    if author == UNSIGNED_AUTHOR:\n        raise RecordInvalid(Reason.UNSIGNED",
            "    if author == UNSIGNED_AUTHOR:\n        return author\n        raise RecordInvalid(Reason.UNSIGNED",
        ),
    ),
    *of(
        "log/membership.py",
        "tests/unit/test_membership.py tests/integration/test_signed.py",
        row("any-key-for-a-name", "found.key == author and found.role in roles", "found.role in roles"),
        row("any-role", "found.key == author and found.role in roles", "found.key == author"),
        row("patterns-before-names", "return self._named.get(name) or next(", "return next("),
        row("anybody-may-be-the-owner", "if author != before.owner:", "if False:"),
        row(
            "nobody-asks-the-next-owner",
            "if (header.owner != before.owner) != (header.accepted is not None):",
            "if False:",
        ),
        row(
            "histories-of-members-are-not-chained",
            "(header.version, header.previous) != (before.version + 1, before.digest)",
            "header.version != before.version + 1",
        ),
        row("an-old-membership-is-for-ever", "if m.until and version > m.until[fragment]", "if False"),
        row(
            "what-a-member-was-it-is",
            "judges = reversed(self.versions) if under is None else [self.versions[under]]",
            "judges = reversed(self.versions)",
        ),
    ),
    *of(
        "log/commits.py",
        "tests/integration/test_signed.py",
        row("anybody-commits", "self.members.require_author(blob, Kind.COMMIT, name, header.members)", "pass"),
        row("membership-may-go-back", "if commit.header.members < members:", "if False:"),
        row("anybody-points", "            await self.require_author(blob, Kind.PACKED)\n", ""),
    ),
    *of(
        "log/speech.py",
        "tests/integration/test_signed.py",
        row("one-batch-of-several", "if len(names) > 1:", "if False:"),
        row(
            "learners-are-syncers",
            "role = MemberRole.SYNCER if owner is None else MemberRole.LEARNER",
            "role = MemberRole.LEARNER",
        ),
    ),
    *of(
        "log/histories.py",
        "tests/unit/test_membership.py",
        row("what-was-said-before-is-forgotten", "if said is not None and said[0] != digest:", "if False:"),
    ),
    *of(
        "syncer/keeper.py",
        "tests/integration/test_signed.py tests/integration/test_one_learner.py",
        row(
            "an-expelled-learner-is-merged-on",
            "if self._members.signed and not judge.permits(",
            "if False and not judge.permits(",
        ),
        row(
            "who-comes-first-decides",
            "        if self._usually.known:\n            believed",
            "        if True:\n            believed",
        ),
    ),
    *of(
        "rounds/bounds.py",
        "tests/unit/test_bounds.py",
        row("steps-take-no-time", "if claim.step_s > 0.0 and steps >", "if False and steps >"),
        row("any-weight", "if weight > (room :=", "if False and weight > (room :="),
        row("each-update-weighs-by-itself", "b.weight * usual_weight - already)", "b.weight * usual_weight)"),
        row("any-length", "if length > b.norm * usually:", "if False:"),
        row("the-short-are-loud", "elif length < usually / b.norm:", "elif False:"),
        row("nobody-is-too-long", "refused = length > b.refused * usually", "refused = False"),
        row("what-is-usual-is-for-ever", "if version - seen.version < REMEMBERED", "if True"),
    ),
    *of(
        "rounds/rounds.py",
        "tests/unit/test_bounds.py",
        row(
            "always-due-is-always-open",
            "if last is None:\n            return -math.inf",
            "if True:\n            return -math.inf",
        ),
        row(
            "ages-are-believed",
            "if since is not None and pointer.boundary_at < since and not pointer.old:",
            "if False:",
        ),
        row("who-never-comes-is-waited-for", "return (here - absent) | {learner", "return here | {learner"),
        row("who-comes-at-times-is-not", "(ABSENT_KNOWN if self._members.has_come(learner) else 1)", "1"),
        row("an-overflow-turns-all-away", "if pointer.digest in by:", "if True:"),
    ),
    *of(
        "permissions.py",
        "tests/unit/test_permissions.py",
        row("a-fragment-reaches-across-slashes", 'FRAGMENT: "[0-9]{5}"', 'FRAGMENT: ".*"'),
        row("a-learner-deletes-claims", "_grant(DELETE, _CHECKPOINTS,", '_grant(DELETE, f"learners/{OWN}/*",'),
        row(
            "strict-learners-have-donors",
            "participant == Participant.LEARNER and donors",
            "participant == Participant.LEARNER",
        ),
        row("a-commit-is-written-over", '_grant(CREATE, "commits/*",', '_grant(REPLACE, "commits/*",'),
        row("a-learner-hears-all", '(("syncer", f"learner/{OWN}"), ', "((ALL_STREAMS,), "),
        row("who-replaces-creates-nothing", "enough = {operation, REPLACE} if operation == CREATE else", "enough ="),
    ),
    *of(
        "doctor/rights.py",
        "tests/integration/test_permissions.py::test_the_doctor_finds_what_is_missing_and_what_is_too_much "
        "tests/integration/test_permissions.py::test_the_doctor_finds_an_administrator_out",
        row(
            "what-is-refused-is-allowed",
            "            except Denied as error:\n                return error",
            "            except Denied as error:\n                return None",
        ),
        row("others-keys-are-free-to-delete", "if not role.may(DELETE, key)]", "if role.may(DELETE, key)]"),
        row(
            "others-keys-are-free-to-create", "free = [key for key in others if not", "free = [key for key in others if"
        ),
        row(
            "others-names-are-free-to-list",
            "yield await _none_may(role, LIST, hidden,",
            "yield await _none_may(role, LIST, [],",
        ),
    ),
    *of(
        "doctor/bus.py",
        "tests/integration/test_tls.py",
        row("whoever-answers-is-verified", "    if not bus.verifies:", "    if bus.verifies:"),
    ),
    *of(
        "doctor/findings.py",
        "tests/integration/test_tls.py",
        row("this-machine-is-far-away", "if ip_address(host).is_loopback:", "if not ip_address(host).is_loopback:"),
        row("tls-is-in-the-clear", 'if parts.scheme in ("https", "rediss"):', 'if parts.scheme in ("https",):'),
    ),
    *of(
        "urls.py",
        "tests/integration/test_tls.py",
        row("authorities-for-what-shows-none", 'if parts.scheme != "rediss":', 'if parts.scheme == "sqlite":'),
        row("authorities-that-are-not-there", "if not Path(authorities).is_file():", "if not authorities:"),
    ),
    *of(
        "store/bucket.py",
        "tests/infra/test_aws.py::test_what_is_too_large_for_one_request_is_created_all_the_same",
        row("in-parts-again", 'and not (self._whole and mode == "create"):', ":"),
    ),
]
