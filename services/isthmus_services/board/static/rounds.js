/* One round as a picture: opened, who answered when, quorum, grace, close, publish. */
"use strict";
(function (I) {
  const { html } = htmPreact;
  const ROW = 26, TOP = 34, WIDTH = 860, LABEL = 150;

  I.Round = ({ round, fragment, version }) => {
    if (round.healed) return html`<p class="note">This commit merged nothing: it heals the fragment.</p>`;
    const marks = round.marks.map((m, n) => ({ ...m, number: n + 1 }));
    const last = Math.max(...marks.map((m) => m.at), ...round.learners.map((l) => l.heard || 0));
    const taken = round.learners.map((l) => l.taken).filter(I.known);
    const first = Math.max(Math.min(...marks.map((m) => m.at), ...taken), -3 * Math.max(last, 0.01));
    const width = Math.max(last - first, 0.01);
    const [begin, end] = [first - 0.08 * width, last + 0.04 * width];
    const x = (s) => LABEL + ((Math.min(end, Math.max(begin, s)) - begin) / (end - begin)) * (WIDTH - LABEL - 30);
    const at = places(marks, x);
    const height = TOP + ROW * round.learners.length + 30;
    const said = round.learners.map((l) => `${l.learner}: ${fate(l)}`).join("; ");
    return html`<figure><figcaption>The round of fragment ${fragment}, version ${version}: seconds since it was opened</figcaption>
      <div class="round" tabindex="0" role="region" aria-label="Picture of the round">
      <svg viewBox=${`0 0 ${WIDTH} ${height}`} width=${WIDTH} height=${height} role="img" aria-label=${`${marks.map((m) => `${m.said} at ${I.seconds(m.at)}`).join("; ")}. ${said}`}>
        ${ticks(begin, end).map((s) => html`<line x1=${x(s)} x2=${x(s)} y1=${TOP} y2=${height - 22} stroke="var(--line)"/>
          <text x=${x(s)} y=${height - 6} text-anchor="middle">${I.seconds(s)}</text>`)}
        ${round.learners.map((l, n) => row(l, TOP + n * ROW, x, begin))}
        ${marks.map((m, n) => html`<path d=${`M${at[n]} 20L${x(m.at)} 30V${height - 22}`} fill="none" stroke="var(--text)" stroke-width=${m.what === "closed" ? 2.5 : 1.2} stroke-dasharray=${m.what === "grace" || m.what === "quorum" ? "5 3" : ""}/>
          <circle cx=${at[n]} cy="11" r="9" fill="var(--panel)" stroke="var(--text)"/>
          <text x=${at[n]} y="15" text-anchor="middle">${m.number}</text>`)}
      </svg></div>
      <ol class="plain">${marks.map((m) => html`<li>${m.said}: ${I.seconds(m.at)}</li>`)}</ol>
      <${I.Legend} entries=${[[I.box("train"), "training (begun earlier: cut off)"], [I.box("upload"), "packed and sent, until it was heard of"],
        [I.box("wait"), "fetched and checked, or waiting for its turn, until accumulated"], [html`<circle cx="12" cy="5.5" r="4.5" fill="var(--merged)"/>`, "in: merged"],
        [html`<path d="M12 0l5 5.5-5 5.5-5-5.5z" fill="var(--late)"/>`, "heard of, and not in"]]}/></figure>`;
  };

  const named = (l) => `${l.learner.length > 16 ? `${l.learner.slice(0, 15)}…` : l.learner}${I.known(l.base) ? ` from ${l.base}` : ""}`;
  const fate = (l) => ({ merged: "merged", "merged next round": `merged, from version ${l.base}`, missed_round: "missed the round", passed: "had nothing to give", missing: "missing" })[l.fate] || l.fate;

  /* Where the numbers over the lines stand: of those that are close, each moves aside for the one before. */
  const places = (marks, x) => {
    const found = [];
    for (const n of marks.map((_, k) => k).sort((a, b) => marks[a].at - marks[b].at || a - b)) {
      const before = found.length ? Math.max(...found.filter(I.known)) : -Infinity;
      found[n] = Math.max(x(marks[n].at), before + 20);
    }
    const over = Math.max(0, Math.max(...found) - (WIDTH - 10));
    return found.map((place) => place - over);
  };

  const row = (l, y, x, begin) => {
    const bar = (a, b, color, h) => (I.known(a) && I.known(b) && b >= begin ? html`<rect x=${x(a)} y=${y + (ROW - h) / 2} width=${Math.max(1.5, x(b) - x(a))} height=${h} fill=${`var(--${color})`}/>` : null);
    const middle = y + ROW / 2;
    return html`<g>
      <text x=${LABEL - 8} y=${middle + 4} text-anchor="end">${named(l)}</text>
      <line x1=${LABEL} x2=${WIDTH - 10} y1=${y + ROW} y2=${y + ROW} stroke="var(--line)"/>
      ${bar(l.began, l.taken, "train", 14)}${bar(l.taken, l.heard, "upload", 14)}${bar(l.heard, l.arrived, "wait", 14)}
      ${I.known(l.arrived) ? html`<circle cx=${x(l.arrived)} cy=${middle} r="5" fill="var(--merged)" stroke="var(--ground)"/>` : null}
      ${l.fate === "missed_round" && I.known(l.heard) ? html`<path d=${`M${x(l.heard)} ${middle - 6}l6 6-6 6-6-6z`} fill="var(--late)"/>` : null}
      ${l.fate === "missing" ? html`<text class="over" x=${LABEL + 8} y=${middle + 4}>missing</text>` : null}
      ${l.fate === "passed" ? html`<text class="over" x=${Math.min(x(l.passed) + 6, WIDTH - 140)} y=${middle + 4}>had nothing to give</text>` : null}
    </g>`;
  };

  const ticks = (begin, end) => {
    const raw = (end - begin) / 7, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const found = [];
    for (let n = Math.ceil(begin / step); n * step <= end; n++) found.push(n * step);
    return found;
  };

  I.fate = fate;
})(window.Isthmus);
