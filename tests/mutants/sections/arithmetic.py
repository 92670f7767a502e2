"""Mistakes in the arithmetic of merges and codecs."""

from mutants.mutant import argued, of, row

MUTANTS = [
    *of(
        "log/polar.py",
        "tests/unit/test_polar.py tests/e2e/test_denormals.py::test_a_compute_that_flushes_computes_nothing",
        row("rounding-may-leave-the-interval", "_WITHIN = 0.999", "_WITHIN = 1.2"),
        row("tall-matrices-are-not-turned", "wide = d.shape[0] <= d.shape[1]", "wide = True"),
        row("a-step-too-few", "for a, b, c in QUINTICS:", "for a, b, c in QUINTICS[:-1]:"),
        row("the-upper-half-is-left", "    if symmetric:\n        kernels.mirror(out)\n", ""),
        row("blocks-of-zeros-are-divided-by-nothing", "if norm > 0.0:", "if norm >= 0.0:"),
        row("another-thread-may-flush", "kernels.require_denormals()  # of the thread that this is\n", "pass\n"),
    ),
    *of(
        "format/isotropic.py",
        "tests/unit/test_polar.py tests/unit/test_rules.py",
        row("blocks-overlap", "length * (i + 1) // parts", "length * (i + 1) // parts + 1"),
        row("what-is-dear-is-the-default", "0.0 < operations <= FLOP_MAX", "0.0 < operations <= 4.0 * FLOP_MAX"),
        row("nothing-is-cheap", "0.0 < operations <= FLOP_MAX", "0.0 <= operations <= FLOP_MAX"),
        row("embeddings-count", "if s.is_matrix and s.role == TensorClass.DENSE", "if s.is_matrix"),
    ),
    *of(
        "runtime/clock.py",
        "tests/unit/test_polar.py tests/unit/test_merge.py",
        row("a-compute-leaves-the-last-part", "pairwise(cuts)]:", "pairwise(cuts[:-1])]:"),
        row("a-compute-is-not-waited-for", "            part.result()\n", "            pass\n"),
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
        "tests/integration/test_one_loop.py::test_an_isotropic_run_folds_to_what_was_merged "
        "tests/integration/test_late_syncer.py",
        row("first-work-overshoots", "/ (1.0 + rules.outer_momentum)", "/ 1.0"),
        row(
            "what-the-codec-drops-is-never-carried",
            "kernels.subtract(master, self.before[at], self.published[at])",
            "kernels.subtract(master, self.before[at] * 0.5, self.published[at])",
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
            "not self._broken and kernels.all_finite(self.published)",
            "not self._broken",
        ),
        row(
            "nobody-asks-whether-the-master-is-finite",
            "not self._broken and kernels.all_finite(self.published)",
            "kernels.all_finite(self.published)",
        ),
        row(
            "digests-of-a-compute-are-in-another-order",
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
        "codecs/kernels/matrices.py",
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
        "codecs/kernels/matrices.py",
        "tests/unit/test_fma.py",
        row("a-sum-half-way-is-rounded-twice", "_HALF = 1 << 28", "_HALF = 1 << 27"),
        row("a-denormal-sum-is-rounded-twice", "_TINY = (1023 - 126) << 52", "_TINY = (1023 - 145) << 52"),
        row("odd-on-the-other-side", "1 if (e > 0.0) == (s > 0.0) else -1", "-1 if (e > 0.0) == (s > 0.0) else 1"),
        row("an-exact-sum-is-made-odd", "if e != 0.0 and bits & 1 == 0:", "if bits & 1 == 0:"),
        row(
            "what-was-there-is-forgotten", "fma_alone(factor, row[j], before[j])", "fma_alone(factor, row[j], into[j])"
        ),
    ),
    *of(
        "codecs/kernels/levels.py",
        "tests/unit/test_levels.py",
        row(
            "a-level-by-one-of-its-features",
            "if not LEVELS[name] <= set(features):",
            "if not LEVELS[name] & set(features):",
        ),
        row(
            "a-level-above-one-that-is-missing",
            "            break\n        found = name",
            "            continue\n        found = name",
        ),
        row("nobody-else-chooses", ' or "NUMBA_CPU_NAME" in os.environ:', ":"),
        row("the-features-of-the-machine-remain", '    os.environ["NUMBA_CPU_FEATURES"] = ""\n', ""),
    ),
    *of(
        "codecs/kernels/vectors.py",
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
        "codecs/kernels/formats.py",
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
            "add(code, piece, -1.0, left, left, compute)",
            "add(code, piece, 1.0, left, left, compute)",
        ),
        row("what-was-before-is-forgotten", "if before is not after:", "if False:"),
        row(
            "the-last-piece-is-not-measured",
            "compute.share(work, pieces(n), SHARE)",
            "compute.share(work, pieces(n) - 1, SHARE)",
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
        "codecs/kernels/rate.py",
        "tests/unit/test_rate.py",
        row("tables-cost-nothing", "if found + overhead <= bits:", "if found <= bits:"),
        row("signs-cost-nothing", "+ (total - counts[0])) / total, top", ") / total, top"),
        row("levels-beyond-the-last-wrap", "least = largest / LEVELS", "least = 0.0"),
        row("rare-symbols-have-no-place", "out[s] = max(1, counts[s] * TOTAL // n)", "out[s] = counts[s] * TOTAL // n"),
        row("a-stream-may-end-anywhere", "return OK if at == stop and a == low", "return OK if a == low"),
        row("states-may-end-anywhere", "and a == low and b == low and c == low and d == low else", "else"),
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
]
