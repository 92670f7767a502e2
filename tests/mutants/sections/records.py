"""Mistakes in records."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "format/records/frame.py",
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
        "format/records/frame.py",
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
        "format/records/keys.py",
        "tests/unit/test_frame_limits.py",
        row("whatever-begins-like-a-key", "_VERSIONED.fullmatch(key)", "_VERSIONED.match(key)"),
    ),
    *of(
        "format/records/fields.py",
        "tests/unit/test_frame_limits.py tests/unit/test_records.py",
        row("a-name-may-end-a-line", '{NAME}\\Z"', '{NAME}$"'),
        row("a-key-may-lead-out-of-the-run", '_SEGMENT = r"[A-Za-z0-9_-]', '_SEGMENT = r"[A-Za-z0-9._-]'),
    ),
]
