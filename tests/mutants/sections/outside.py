"""Mistakes in stores, buses and processes."""

from mutants.mutant import argued, of, row

MUTANTS = [
    *of(
        "store/bucket.py",
        "tests/unit/test_bucket_answers.py",
        row("a-conflict-means-exists", "if _status(error) == 409 and _code(error) not in EXISTS:", "if False:"),
        row("a-create-writes-over", "whole, mode=mode, use", 'whole, mode="overwrite", use'),
        row("a-write-is-sent-again", "write=client(0),", "write=client(2),"),
        row(
            "ranges-are-of-any-object",
            'same = {"if_match": first.meta["e_tag"]} if first.meta["e_tag"] else {}',
            "same: dict[str, str] = {}",
        ),
        row("nothing-says-what-the-bytes-are", '                "checksum_algorithm": "SHA256",\n', ""),
        row("a-write-may-hang", "READ_TIMEOUT.total_seconds() + len(data) / WRITE_LEAST", "3600.0"),
        row("no-bucket-is-nothing-to-delete", "if _code(error) not in MISSING:", "if False:"),
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
        row("an-unknown-refusal-is-an-outage", "if code in DENIED or status in (401, 403, 405):", "if code in DENIED:"),
        row("any-404-is-a-missing-object", "if code in MISSING:", "if code == MISSING or status == 404:"),
        row(
            "a-conflict-means-exists",
            'EXISTS = {"PreconditionFailed", "412", "BlobAlreadyExists"}',
            'EXISTS = {"PreconditionFailed", "412", "BlobAlreadyExists", "ConditionalRequestConflict", "409"}',
        ),
    ),
    *of(
        "store/edge.py",
        "tests/conformance/test_answers.py",
        row("an-empty-listing-is-believed", "if found or not self.landmark:", "if True:"),
    ),
    *of(
        "store/s3.py",
        "tests/conformance/test_answers.py",
        row("a-page-is-an-object", 'if "ContentRange" not in response:', "if False:"),
        row("a-page-says-that-it-is-stored", 'if not answer.get("ETag"):', "if False:"),
        row("a-page-lists-nothing", 'if "Name" not in page:', "if False:"),
    ),
    *of(
        "bus/replies.py",
        "tests/conformance/test_replies.py",
        row("a-replica-is-waited-for", '"READONLY": Meaning(Action.RECONNECT,', '"READONLY": Meaning(Action.WAIT,'),
        row("a-full-server-ends-everybody", '"OOM": Meaning(Action.WAIT,', '"OOM": Meaning(Action.END,'),
    ),
    *of(
        "bus/redis.py",
        "tests/conformance/test_replies.py",
        row(
            "a-demoted-server-keeps-its-connections",
            "self._reader, self._writer = self._connect()\n        while",
            "while",
        ),
    ),
    *of(
        "store/credentials.py",
        "tests/integration/test_credentials.py",
        row("files-are-read-once", "self._anew = self._stamps != _stamps(self._files)", "self._anew = False"),
        row("credentials-are-renewed-when-they-are-over", "max(0.1, SPENT * left_s)", "left_s + 1.0"),
        row(
            "what-a-store-says-of-credentials-is-nothing",
            "self._doubted, self._anew = now, True",
            "self._doubted = now",
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
        row(
            "ranges-of-a-range-begin-at-0",
            "bytes={start + at}-{start + at + len(part) - 1}",
            "bytes={at}-{at + len(part) - 1}",
        ),
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
            "        except (ObjectMissing, Denied):\n            self._outage.answered(operation)\n            raise\n",
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
            "        elif self._down_since is None:\n            self._down_since",
            "        else:\n            self._down_since",
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
            "while self._unsaid and id(self._unsaid[0]) in sent:",
            "for _ in messages[: len(self._unsaid)]:",
        ),
        argued(
            "a-word-in-between-is-not-sent",
            "            self._wake.clear()\n            try:\n                await self.flush()\n            except",
            "            try:\n                await self.flush()\n                self._wake.clear()\n            except",
            "flush ends only where nothing is left to be said, and nobody else runs between that and forgetting the word",
        ),
        row(
            "nobody-hears-of-the-gap",
            "                self.down_since = None\n                gap(self.answered_at - since)\n",
            "                self.down_since = None\n",
        ),
        row("an-outage-lasts-no-time", "gap(self.answered_at - since)", "gap(0.0)"),
        row("announcements-pile-up", "if isinstance(message, Announce):", "if False:"),
        row("a-base-is-that-of-any-fragment", "return message.fragment, message.base", "return 0, message.base"),
        row("a-fragment-has-one-base", "return message.fragment, message.base", "return message.fragment, 0"),
        row(
            "what-came-after-comes-before-the-gap",
            "            if (since := self.down_since) is not None:\n                self.down_since = None\n                gap(self.answered_at - since)\n            for pair in self._advance(found):\n                yield pair\n",
            "            for pair in self._advance(found):\n                yield pair\n            if (since := self.down_since) is not None:\n                self.down_since = None\n                gap(self.answered_at - since)\n",
        ),
        row("streams-that-are-gone-are-read-on", "                self._leave(name)\n", "                pass\n"),
        row(
            "one-that-was-heard-is-left-when-the-list-says-so",
            "if now - self._heard.get(name, -math.inf) >= RECENT_S:",
            "if True:",
        ),
        row("a-stream-begins-anew-when-it-speaks-again", "{name: self._left.pop(name) for", "{name: START for"),
        row("names-of-the-past-are-asked-for-always", "None if past else RECENT_S", "None"),
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
        "agent/tolerance.py",
        "tests/unit/test_refusals.py tests/unit/test_tolerance.py",
        row(
            "what-never-worked-is-ridden-out",
            "            if not (vouched or _vouching(kind) in self._worked):\n                raise\n",
            "",
        ),
        row(
            "refusals-are-ridden-out-for-ever",
            "found.tolerated = for_s < self._limit_s",
            "found.tolerated = True",
        ),
        row("nothing-is-vouched-for", "        self._vouched = True\n", "        self._vouched = False\n"),
        row(
            "the-clock-of-a-refusal-never-stops",
            "if self._refusals.pop(kind, None) is not None:",
            "if self._refusals.get(kind) is not None:",
        ),
        row("each-refusal-begins-anew", "if found is None or now - found.last > APART_S:", "if True:"),
        row("a-refusal-of-yesterday-goes-on", "if found is None or now - found.last > APART_S:", "if found is None:"),
        row(
            "nothing-there-is-no-answer",
            "        except ObjectMissing:\n            self._good(kind)\n            raise\n",
            "        except ObjectMissing:\n            raise\n",
        ),
        row("all-folders-are-one", 'return kind.partition("/")[0]', 'return kind.partition(" ")[0]'),
        row(
            "a-folder-that-works-hides-the-one-beside-it",
            "return f\"{what} {key.rpartition('/')[0] or key}/\"",
            "return f\"{what} {key.partition('/')[0]}/\"",
        ),
        row("creating-is-another-reading", '"put": "write"}', '"put": "write", "create": "read"}'),
        row(
            "what-was-refused-long-ago-still-is",
            "if found.tolerated and found.last >= oldest]",
            "if found.tolerated]",
        ),
        row(
            "an-update-is-ridden-out",
            '        if operation == "get" and key.startswith(UPDATES):\n            return await send()\n',
            "",
        ),
        row("it-is-said-every-time", "                self._said_at = now\n", ""),
        row(
            "the-shortest-refusal-counts",
            'return min(lately, key=lambda kind: self._refusals[kind].since, default="")',
            'return max(lately, key=lambda kind: self._refusals[kind].since, default="")',
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
        row("those-passed-over-only", "        self._waiting.extendleft(reversed(passed_over))\n", ""),
        row(
            "a-free-slot-is-not-handed-on",
            "            del self._held[user]\n        self._serve()\n",
            "            del self._held[user]\n",
        ),
        row(
            "the-first-that-must-wait-stops-all",
            "                passed_over.append(turn)\n",
            "                passed_over.append(turn)\n                break\n",
        ),
        row(
            "one-with-its-share-waits-for-the-others",
            "            if not turn.told:\n                turn.told = True\n                turn.begun()\n",
            "            if may and not turn.told:\n                turn.told = True\n                turn.begun()\n",
        ),
        row("the-slow-are-remembered-for-ever", "            self._slow.clear()\n", "            pass\n"),
    ),
]
