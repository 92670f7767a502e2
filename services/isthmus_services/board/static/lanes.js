/* A lane for each learner: what it did when, or where that is too much to draw, what became of its rounds. */
"use strict";
(function (I) {
  const { html, useMemo } = htmPreact;
  const HEIGHT = 30, MOST = 1000; // a canvas has a greatest height

  /* Stretches of time that touch become one. */
  const union = (spans) => {
    const sorted = [...spans].sort((a, b) => a[0] - b[0]);
    const found = [];
    for (const [a, b] of sorted) {
      const last = found[found.length - 1];
      if (last && a <= last[1] + 1e-3) last[1] = Math.max(last[1], b);
      else found.push([a, b]);
    }
    return found;
  };

  const WORDS = { train: "trained for", upload: "was on its way", wait: "arrived, waited to be merged", merged: "merged", missed_round: "missed its round", rejected: "was rejected", repeated: "was rejected without loss", gone: "not expected any more", here: "expected again" };

  I.Lanes = ({ data, mark, only }) => {
    const all = data.learners.filter((l) => !only || only.includes(l.learner)).sort((a, b) => a.learner.localeCompare(b.learner, "en", { numeric: true }));
    const lanes = all.slice(0, MOST), height = lanes.length <= 100 ? HEIGHT : lanes.length <= 400 ? 14 : 8;
    const names = lanes.map((l) => l.learner);
    const sums = lanes.reduce((a, l) => a + l.merged.reduce((b, n) => b + n, 0), 0);
    const version = `${data.begin} ${data.end} ${names.length} ${sums} ${data.pieces ? data.pieces.length : data.edges.length} ${data.incarnations.length}`;
    const by = useMemo(() => {
      const found = new Map(); // a learner may be called anything, also as what every object has
      for (const piece of data.pieces || []) {
        if (!found.has(piece.learner)) found.set(piece.learner, { train: [], upload: [], wait: [], marks: [], all: [] });
        const one = found.get(piece.learner);
        one.all.push(piece);
        if (one[piece.what]) one[piece.what].push([piece.from, piece.to]);
        else one.marks.push(piece);
      }
      for (const one of found.values()) for (const what of ["train", "upload", "wait"]) one[what] = union(one[what]);
      return found;
    }, [version]);
    const exact = data.pieces !== null;
    const paint = (ctx, n, y, h, x, left, right) => {
      ctx.fillStyle = I.css("away");
      ctx.fillRect(left, y + 3, right - left, h - 6);
      if (exact) paintExact(ctx, by.get(names[n]), y, h, x);
      else paintSums(ctx, lanes[n], data.edges, y, h, x);
      for (const one of data.incarnations) {
        if (one.learner !== names[n]) continue;
        ctx.fillStyle = I.css("text");
        ctx.fillRect(x(one.began) - 1, y + 1, 2, h - 2);
        ctx.textAlign = "left";
        ctx.font = "11px system-ui, sans-serif";
        ctx.lineWidth = 4;
        ctx.strokeStyle = I.css("ground");
        ctx.strokeText(`↻${one.incarnation}`, x(one.began) + 4, y + 9);
        ctx.fillText(`↻${one.incarnation}`, x(one.began) + 4, y + 9);
      }
    };
    const read = (n, t) => (exact ? readExact(by.get(names[n]), t) : readSums(lanes[n], data.edges, t));
    const open = (n, t) => {
      const piece = exact && by.get(names[n]) && nearest(by.get(names[n]).all, t);
      if (piece && distance(piece, t) < (data.end - data.begin) / 20 && (piece.what === "gone" || piece.what === "here")) I.go(I.href(`commits/${piece.fragment}/${piece.version}`));
      else if (piece && distance(piece, t) < (data.end - data.begin) / 20) I.go(I.href(`updates/${piece.fragment}/${piece.learner}/${piece.base}`));
      else I.go(I.href(`learners/${names[n]}`));
    };
    if (!names.length) return html`<p class="note">No learner is known yet: its first heartbeat or merged update begins its lane.</p>`;
    return html`<figure><figcaption>What each learner did${exact ? "" : ": what became of its rounds"}, over time</figcaption>
      <${I.Rows} title="Learners over time" names=${names} height=${height} begin=${data.begin} end=${data.end} mark=${mark}
        paint=${paint} read=${read} open=${open} step=${(data.end - data.begin) / 60} version=${version}/>
      <${I.Legend} entries=${exact ? EXACT : SUMS}/>
      <p class="note">${exact
        ? "Drawn from every commit of this time: of work that was never merged the log knows no beginning, and its lane stays empty (away, or lost)."
        : all.length > MOST ? `The first ${MOST} of ${all.length} learners: filter by name to see others.` : "Columns are shares of the rounds that expected the learner. Zoom in (at most 300 commits) to see every update."}</p></figure>`;
  };

  const paintExact = (ctx, one, y, h, x) => {
    if (!one) return;
    const bar = (spans, color, top, height) => {
      ctx.fillStyle = I.css(color);
      for (const [a, b] of spans) ctx.fillRect(x(a), y + top, Math.max(1, x(b) - x(a)), height);
    };
    bar(one.train, "train", 3, 9);
    bar(one.upload, "upload", 13, 5);
    bar(one.wait, "wait", 13, 5);
    for (const piece of one.marks) {
      const at = x(piece.to);
      ctx.fillStyle = ctx.strokeStyle = I.css({ merged: "merged", missed_round: "late", rejected: "rejected", repeated: "wait" }[piece.what] || "text");
      ctx.lineWidth = 2;
      ctx.beginPath();
      if (piece.what === "merged") ctx.rect(at - 1, y + 19, 2, 8);
      else if (piece.what === "missed_round") { ctx.moveTo(at, y + 18); ctx.lineTo(at + 4, y + 23); ctx.lineTo(at, y + 28); ctx.lineTo(at - 4, y + 23); ctx.fill(); continue; }
      else if (piece.what === "rejected") { ctx.moveTo(at - 3, y + 19); ctx.lineTo(at + 3, y + 27); ctx.moveTo(at + 3, y + 19); ctx.lineTo(at - 3, y + 27); ctx.stroke(); continue; }
      else if (piece.what === "gone" || piece.what === "here") { ctx.arc(at, y + 23, 3, 0, 7); if (piece.what === "gone") ctx.stroke(); else ctx.fill(); continue; }
      else ctx.rect(at - 1, y + 21, 2, 3);
      ctx.fill();
    }
  };

  const paintSums = (ctx, lane, edges, y, h, x) => {
    for (let k = 0; k + 1 < edges.length; k++) {
      const whole = Math.max(lane.expected[k], lane.merged[k] + lane.missed_round[k] + lane.updates_rejected[k]);
      if (!whole) continue;
      const left = x(edges[k]), width = Math.max(1, x(edges[k + 1]) - left + 0.5);
      let top = y + h - 3;
      for (const [key, color] of [["merged", "merged"], ["missed_round", "late"], ["updates_rejected", "rejected"]]) {
        const part = ((h - 6) * lane[key][k]) / Math.max(whole, 1);
        ctx.fillStyle = I.css(color);
        ctx.fillRect(left, top - part, width, part);
        top -= part;
      }
      if (lane.missing[k]) {
        ctx.fillStyle = I.css("wait");
        const part = Math.min(top - (y + 3), ((h - 6) * lane.missing[k]) / whole);
        ctx.fillRect(left, top - part, width, part);
      }
    }
  };

  const nearest = (pieces, t) => pieces.reduce((best, p) => (!best || distance(p, t) < distance(best, t) ? p : best), null);
  const distance = (p, t) => (t < p.from ? p.from - t : t > p.to ? t - p.to : 0);
  const readExact = (one, t) => {
    if (!one) return "nothing of it was merged from this time";
    const there = one.all.filter((p) => distance(p, t) === 0 && p.what !== "merged");
    const piece = there[0] || nearest(one.all, t);
    if (!piece) return "nothing";
    const which = piece.what === "gone" || piece.what === "here" ? `by fragment ${piece.fragment}, version ${piece.version}` : `fragment ${piece.fragment}, from version ${piece.base}, into version ${piece.version}`;
    return `${there.length ? "" : "next to it: "}${WORDS[piece.what]} (${which})${piece.to > piece.from ? `, ${I.seconds(piece.to - piece.from)}` : ""}${there.length > 1 ? ` and ${there.length - 1} more` : ""}`;
  };
  const readSums = (lane, edges, t) => {
    const k = edges.findIndex((e, n) => n + 1 < edges.length && t >= e && t <= edges[n + 1]);
    if (k < 0) return "";
    return `expected ${lane.expected[k]} times, merged ${lane.merged[k]}, missed its round ${lane.missed_round[k]}, rejected ${lane.updates_rejected[k]}, missing ${lane.missing[k]}`;
  };

  const EXACT = [
    [I.box("train"), "training"], [I.box("upload"), "on its way"], [I.box("wait"), "arrived, waiting"],
    [htmPreact.html`<rect x="10" y="1" width="3" height="9" fill="var(--merged)"/>`, "merged"],
    [htmPreact.html`<path d="M12 0l5 5.5-5 5.5-5-5.5z" fill="var(--late)"/>`, "missed its round"],
    [htmPreact.html`<path d="M8 1l8 9M16 1l-8 9" stroke="var(--rejected)" stroke-width="2"/>`, "rejected"],
    [htmPreact.html`<circle cx="12" cy="5.5" r="4" fill="none" stroke="var(--text)" stroke-width="2"/>`, "not expected any more"],
    [htmPreact.html`<circle cx="12" cy="5.5" r="4" fill="var(--text)"/>`, "expected again"],
    [htmPreact.html`<text x="2" y="10">↻2</text>`, "restarted: its second incarnation"], [htmPreact.html`<rect x="10" y="4" width="3" height="4" fill="var(--wait)"/>`, "rejected without loss"], [I.box("away"), "away"],
  ];
  const SUMS = [[I.box("merged"), "merged"], [I.box("late"), "missed its round"], [I.box("rejected"), "rejected"], [I.box("wait"), "missing"], [I.box("away"), "no round expected it: it was away, or none was made"], [htmPreact.html`<text x="2" y="10">↻2</text>`, "restarted"]];
})(window.Isthmus);
