/* The pages. Each is what one question to the board answers, for now or for the moment in the address. */
"use strict";
(function (I) {
  const { html, useState } = htmPreact;
  const { Term, Tile, Table, Answer, Lines, CommitLink, UpdateLink, LearnerLink, Link, Chart, styled } = I;

  const PARTS = ["merged", "overwritten", "late", "pending", "rejected", "lost"];
  const MEANS = { merged: "kept", overwritten: "overwritten", late: "late", pending: "pending", rejected: "rejected", lost: "lost" };

  /* The stretch of time that is shown: chosen in the address, else up to the moment, or all of it. */
  const stretch = () => {
    const { from, to } = I.where.query;
    return { from: from ? I.moment(from) : null, to: to ? I.moment(to) : null };
  };
  const zoom = (from, to) => I.withQuery({ from: I.stamp(from), to: I.stamp(to) });
  const LATELY = [["Last minute", 60], ["Last hour", 3600], ["Last day", 86400], ["Last week", 604800]];
  const Zoom = ({ begin, end, all }) => {
    const width = end - begin, middle = (begin + end) / 2, whole = !I.where.query.from && !I.where.query.to;
    const show = (from, to) => {
      const wide = Math.min(Math.max(to - from, 0.05), all[1] - all[0]);
      const first = Math.min(Math.max(all[0], from), all[1] - wide);
      if (wide >= 0.999 * (all[1] - all[0])) I.withQuery({ from: "", to: "" });
      else zoom(first, first + wide);
    };
    const button = (word, off, from, to) => html`<button type="button" disabled=${I.offline || off} onClick=${() => show(from, to)}>${word}</button>`;
    return html`<div class="controls" role="group" aria-label="Stretch of time">
      ${button("Zoom in", false, middle - width / 4, middle + width / 4)}
      ${button("Zoom out", whole, middle - width, middle + width)}
      ${button("◀ Earlier", whole || begin <= all[0], begin - width / 2, end - width / 2)}
      ${button("Later ▶", whole || end >= all[1], begin + width / 2, end + width / 2)}
      ${LATELY.filter(([, s]) => s === 60 || s < all[1] - all[0]).map(([word, s]) => button(word, false, all[1] - s, all[1]))}
      ${button("All of it", whole, all[0], all[1])}
      <span class="note">${I.span(begin, end)}</span></div>`;
  };

  /* --- Run ---------------------------------------------------------------------------------------------------- */

  I.RunPage = ({ state }) => {
    const at = I.where.at;
    const { from, to } = stretch();
    const lines = I.useAsk("series", { from, to });
    const measured = I.useAsk("measured", null, { every: 30000 });
    return html`<${Answer} of=${state} what="the state of the run">${(s) => html`
      <p class="sentence" id="sentence">${s.sentence}</p>
      ${s.reading ? html`<progress value=${s.read} max="1" aria-label="share of the log that was read"></progress>` : null}
      ${s.trouble ? html`<p class="trouble">${s.trouble}</p>` : null}
      ${s.notes.map((note) => html`<p>${note}</p>`)}
      <${Warnings} found=${s.warnings}/>
      <${Tiles} s=${s}/>
      <h2>Over time</h2>
      <${Answer} of=${lines} what="lines over time">${(l) => html`<${Zoom} begin=${l.begin} end=${l.end} all=${[s.begin, s.end]}/><${RunCharts} l=${l} measured=${measured.data} at=${at}/>`}</${Answer}>
      <${Tokens} l=${lines.data}/>
      <${Happened}/>
      <h2>Rejections of updates</h2>
      ${s.reasons.length ? html`<${Table} name="Rejections by reason" first="times" descending rows=${s.reasons} columns=${[
        { key: "reason", name: "reason", left: true }, { key: "times", name: "times", show: (r) => I.count(r.times) },
        { key: "work_lost", name: "is its work lost?", left: true, by: (r) => (r.work_lost ? "yes" : "no"), show: (r) => (r.work_lost ? (r.usual ? "yes, as usual" : "yes") : "no: its work is merged, waits, or was counted before") },
        { key: "why", name: "why", left: true },
      ]}/>` : html`<p class="note">No update was rejected by this moment.</p>`}`}</${Answer}>`;
  };

  /* Restarts and takeovers, newest first: what happened while nobody looked. */
  const Happened = () => {
    const found = I.useAsk("services", { at: I.where.at });
    return html`<h2>What happened</h2><${Answer} of=${found} what="what happened">${(d) => {
      const all = [
        ...d.restarts.map((r) => ({ at: r.began, what: html`<${LearnerLink} name=${r.learner}/> came back as incarnation ${r.incarnation}, from step ${I.count(r.step)}${r.away_s === null ? "" : `, after ${I.seconds(r.away_s)}`}` })),
        ...d.takeovers.map((t) => ({ at: t.at, what: html`${t.to} took over from ${t.from}: fragments ${ranges(t.fragments.map((f) => f.fragment).sort((a, b) => a - b))} had no commit for up to ${I.seconds(t.stood_s.largest)}` })),
      ].sort((a, b) => b.at - a.at);
      return all.length ? html`<ul class="plain">${all.slice(0, 12).map((x) => html`<li><${I.TimeLink} at=${x.at}/>: ${x.what}</li>`)}</ul>
        ${all.length > 12 ? html`<p class="note"><${Link} to="services">${all.length - 12} more</${Link}></p>` : null}` : html`<p class="note">No learner was restarted, and no syncer took over.</p>`;
    }}</${Answer}>`;
  };

  const Warnings = ({ found }) => html`<div aria-live="polite">${found.map((w) => html`
    <div class="warning"><b>${w.said}</b>What to do: ${w.do}${w.link ? html` (<${Link} to=${w.link.split("?")[0]} query=${Object.fromEntries(new URLSearchParams(w.link.split("?")[1] || ""))}>see</${Link}>)` : null}</div>`)}</div>`;

  // A flag stays on one line: its dashes are no place to break it.
  const flagged = (text) => text.split(/(--[\w-]+)/).map((part) => part.startsWith("--") ? html`<span class="flag">${part}</span>` : part);

  const Tiles = ({ s }) => {
    const t = s.totals, b = s.bytes;
    const least = Math.min(...t.versions), most = Math.max(...t.versions);
    return html`<dl class="tiles" aria-label="Totals" id="totals">
      <${Tile} term="tokens" name="Tokens in commits" value=${html`<span id="tokens">${I.short(t.tokens)}</span>`} more=${`${I.count(t.tokens)}, of ${I.short(t.processed)} processed up to the newest merged updates`}/>
      <${Tile} term="kept" name="Tokens merged" value=${I.share(t.kept)} more=${I.where.at === null ? "of those processed up to the newest merged updates" : `of those processed up to the newest merged updates, as of ${I.date(t.as_of)}`}/>
      <${Tile} term="commit" name="Commits" value=${html`<span id="commits">${I.count(t.commits)}</span>`} more=${`versions ${least}${most > least ? ` to ${most}` : ""}${t.last_commit_at ? `, last ${I.date(t.last_commit_at)}` : ""}`}/>
      <${Tile} term="participation" name="Participation" value=${I.share(t.participation)} more=${`of the learners that a round expects, the mean over commits; ${I.count(t.updates)} updates of ${t.learners} learners, ${I.count(t.clipped)} of them clipped`}/>
      <${Tile} term="missed" name="Missed their round" value=${I.count(t.missed_round)} more=${s.training ? "the next round may still merge them" : "the next round could still merge them"}/>
      <${Tile} term="rejected" name="Updates rejected" value=${html`<span id="rejected">${I.count(t.updates_rejected)}</span>`} more=${`and ${I.count(t.rejected_without_loss)} rejected without loss`}/>
      <${Tile} term="quorum" name="Quorum missed" value=${I.count(t.quorum_missed)} more=${t.commits ? `rounds were closed by: ${Object.entries(t.closed_by).map(([k, n]) => `${k} ${I.count(n)}`).join(", ")}` : "no round closed yet"}/>
      <${Tile} term="grace" name="A round waits" value=${I.seconds(t.waited_s.median)} more=${t.waited_s.p99 === null ? "no round closed yet" : `half of them less; 99 of 100 less than ${I.seconds(t.waited_s.p99)}`}/>
      <${Tile} term="bytes_merged" name="Bytes merged" value=${I.bytes(b.merged)} more=${`planned ${I.bytes(b.merged_planned)}${b.up !== null ? `; learners said that they sent ${I.bytes(b.up)} up (less what a killed one did not live to say), and ${I.bytes(b.checkpoints)} of checkpoints` : ""}`}/>
      <${Tile} name="Bytes down" value=${b.down === null ? I.bytes(b.down_planned) : I.bytes(b.down)} more=${b.down === null ? "planned; nobody listened to what learners fetched" : `planned ${I.bytes(b.down_planned)} for versions alone: joining, commits and checkpoints come on top`}/>
      <${Tile} name="Cost so far" value=${I.usd(s.cost.usd)} more=${flagged(`${Object.entries(s.cost.parts).filter(([, v]) => v > 0).map(([k, v]) => `${k} ${I.usd(v)}`).join(", ")}${s.cost.assumed ? `; assumed: ${s.cost.assumed}` : ""}`)}/>
      <${Tile} term="syncer" name="Syncers" value=${I.count(t.syncers)} more="that have written a commit"/>
    </dl>`;
  };

  const RunCharts = ({ l, measured, at }) => {
    const span = [l.begin, l.end], onZoom = I.offline ? null : zoom, each = `each ${I.seconds(l.log.seconds)}`;
    // Where there is no commit, no chart from the log has a value: one reason for all of them.
    const none = l.log.commits.some((n) => n > 0) ? "" : I.where.query.from || I.where.query.to ? "No commit was written in this stretch of time: zoom out, or choose another one." : "Nothing was merged yet: the first commit begins this chart.";
    const common = { mark: at, span, onZoom, none }, log = { ...common, at: l.log.at };
    const line = (name, values) => ({ name, values: none ? [] : values, noisy: true });
    const losses = Object.entries(l.losses.learners).map(([name, values]) => ({ name, values, join: true, noisy: true })).filter((x) => x.values.some(I.known));
    const many = losses.length > 8;
    return html`<div class="charts">
      <${Chart} ...${common} title="Training loss (merged)" term="losses" unit="mean over the steps of a merged update, since its base" quantity="training loss" at=${l.losses.at} lines=${styled(many ? meanOf(losses) : losses)} show=${loss} zero=${false}
        none=${none || "No merged update states a loss. Give it in the training loop: link.step(tokens=…, loss=…). The chart then has every update from there on."} note=${many ? "Of many learners: the mean, the least and the most." : ""}/>
      ${measured && Object.entries(measured.series).filter(([name, p]) => p.length || measured.contested[name].length).map(([name, points]) => html`<${Chart} ...${common} title=${`${name}, of the global model`} unit="evaluation, as its follower measures it" quantity="evaluation"
        at=${points.map((p) => p[0])} lines=${styled([{ name, values: points.map((p) => p[2]), join: true }])} show=${loss} zero=${false} note=${measured.contested[name].join("; ")}/>`)}
      <${Chart} ...${log} title="Tokens processed and merged" term="processed" unit="tokens a second" lines=${styled([line("processed", l.log.processed_per_s), line("merged", l.log.tokens_per_s)])} show=${I.short}/>
      <${Chart} ...${log} title="Participation, and tokens merged" term="participation" max=${1.05} none=${none || "No round of this time expected a learner: its commits only healed fragments."} lines=${styled([line("participation", l.log.participation), { ...line("tokens merged", l.log.kept), noisy: false, join: true }])} show=${(v) => I.share(v)}/>
      <${Chart} ...${log} title="Rounds closed, by what" term="round" unit=${each} lines=${styled([...Object.entries(l.log.closed_by).map(([name, values]) => line(name, values)), line("quorum missed", l.log.quorum_missed)])} show=${(v) => I.number(v, 3)}/>
      <${Chart} ...${common} title="Period" term="period" unit="steps, mean over the commits" at=${l.log.at} lines=${styled([line("period", l.log.period)])} show=${(v) => I.number(v, 3)}/>
      <${Chart} ...${log} title="Updates that missed their round, or were rejected" term="missed" unit=${each} lines=${styled([line("missed their round", l.log.missed_round), line("rejected", l.log.updates_rejected)])} show=${(v) => I.number(v, 3)}/>
      <${Chart} ...${log} title="Bytes merged" term="bytes_merged" unit="bytes a second" lines=${styled([line("merged", l.log.bytes_merged_per_s)])} show=${I.bytes}/>
      <${Chart} ...${common} title="The ledger" term="ledger" unit="share of tokens processed" max=${1.05} at=${l.heard.at} lines=${styled(PARTS.map((name) => ({ name, values: l.heard.parts[name] || [], join: true })))} show=${(v) => I.share(v, 1)}
        none="No learner was heard in this stretch of time. Learners say it on the bus: only a board that listens while they train can draw it. The table below has it as of their newest checkpoints." note="Drawn for the time in which a board listened."/>
    </div>`;
  };
  const loss = (v) => (I.known(v) && Math.abs(v) >= 1e4 ? I.short(v) : I.number(v, 4));
  const meanOf = (lines) => {
    const over = (f) => lines[0].values.map((_, k) => { const there = lines.map((l) => l.values[k]).filter(I.known); return there.length ? f(there) : null; });
    return [{ name: "mean", values: over((v) => v.reduce((a, b) => a + b, 0) / v.length), join: true, noisy: true }, { name: "least", values: over((v) => Math.min(...v)), join: true, noisy: true }, { name: "most", values: over((v) => Math.max(...v)), join: true, noisy: true }];
  };

  /* The ledger of learners as of their checkpoints, where nobody listened. */
  const Tokens = ({ l }) => {
    const wanted = l !== null && l !== undefined && !l.heard.at.some((_, k) => I.known(l.heard.parts.merged && l.heard.parts.merged[k]));
    const found = I.useAsk("ledger", null, { every: 60000, wanted });
    if (!wanted) return null;
    return html`<h2>Where the tokens went</h2><${Answer} of=${found} what="the ledger">${(d) => {
      if (d.why) return html`<p class="note">${d.why}</p>`;
      const rows = Object.entries(d.learners).map(([learner, x]) => {
        const sums = Object.fromEntries(PARTS.map((p) => [p, x.fragments.reduce((a, f) => a + f[p], 0) / Math.max(1, x.fragments.length)]));
        return { learner, step: x.step, processed: x.processed, ...sums };
      });
      return html`<p class="note">Of each learner as of its newest checkpoint, in the mean over fragments.</p><${Table} name="Ledger of learners" rows=${rows} empty="The store has no checkpoint: each learner adds its row when it stores one." columns=${[
        { key: "learner", name: "learner", left: true, show: (r) => html`<${LearnerLink} name=${r.learner}/>` }, { key: "step", name: "step", show: (r) => I.count(r.step) },
        { key: "processed", name: "processed [tokens]", show: (r) => I.count(r.processed) }, ...PARTS.map((p) => ({ key: p, name: p, term: MEANS[p], show: (r) => I.share(r[p] / Math.max(1, r.processed), 1) }))]}/>`;
    }}</${Answer}>`;
  };

  /* --- Learners ------------------------------------------------------------------------------------------------ */

  I.LearnersPage = ({ state }) => {
    const at = I.where.at;
    const { from, to } = stretch();
    const [filter, setFilter] = useState("");
    const [only, setOnly] = useState("all");
    const table = I.useAsk("learners", { at });
    const lanes = I.useAsk("lanes", { from, to });
    return html`<h2>Learners</h2>
      <div class="controls">
        <label>Name <input type="search" value=${filter} onInput=${(e) => setFilter(e.target.value)}/></label>
        <label>Show <select value=${only} onChange=${(e) => setOnly(e.target.value)}>
          <option value="all">all</option><option value="trouble">with trouble: silent, away, or waiting</option><option value="missing">missing in over half of their rounds</option>
          <option value="rejected">with rejected updates</option><option value="restarted">restarted at least once</option></select></label></div>
      <${Answer} of=${table} what="learners">${(d) => {
        const rows = d.learners.filter((r) => r.learner.toLowerCase().includes(filter.toLowerCase()) && KINDS[only](r));
        return html`<p class="note">${I.count(rows.length)} of ${I.count(d.learners.length)}; sums are as of ${I.date(d.as_of)}.</p>
          <${Table} name="Learners" rows=${rows} first="learner" columns=${LEARNER} empty=${d.learners.length ? "No learner is like that: change the name or the choice above." : "No learner is known yet: it appears with its first heartbeat or merged update."}/>
          ${state.data ? html`<h3>Over time</h3><${Answer} of=${lanes} what="lanes">${(l) => html`<${Zoom} begin=${l.begin} end=${l.end} all=${[state.data.begin, state.data.end]}/>
            <${I.Lanes} data=${l} mark=${at} only=${rows.map((r) => r.learner)}/>`}</${Answer}>` : null}`;
      }}</${Answer}>`;
  };
  const KINDS = {
    all: () => true,
    trouble: (r) => !["training", "done", undefined].includes(r.state),
    missing: (r) => r.participation !== null && r.participation < 0.5,
    rejected: (r) => r.updates_rejected > 0,
    restarted: (r) => r.incarnation > 1,
  };
  const said = (r, key) => (r.said ? r.said[key] : null);
  const up = (r) => said(r, "bytes_up");
  const LEARNER = [
    { key: "learner", name: "learner", left: true, show: (r) => html`<${LearnerLink} name=${r.learner}/>` },
    { key: "state", name: "state", term: "state", left: true, by: (r) => r.state || "", show: (r) => r.state || "not known" },
    { key: "incarnation", name: "incarnation", term: "incarnation" },
    { key: "step", name: "step", term: "step", show: (r) => html`${I.count(r.step)}${said(r, "target") ? `/${I.count(said(r, "target"))}` : ""}` },
    { key: "loss", name: "loss (last step)", term: "loss", by: (r) => said(r, "loss") ?? r.loss, show: (r) => (said(r, "loss") === null && I.known(r.loss) ? `${loss(r.loss)} (merged)` : loss(said(r, "loss"))) },
    { key: "rate", name: "tokens/s", term: "rate", by: (r) => rate(r), show: (r) => (r.said && r.said.left ? "" : I.short(rate(r))) },
    { key: "expected", name: "expected", term: "expected", show: (r) => I.count(r.expected) },
    { key: "participation", name: "in", term: "participation", show: (r) => I.share(r.participation) },
    { key: "merged", name: "merged", term: "merged", show: (r) => I.count(r.merged) },
    { key: "missed_round", name: "missed round", term: "missed", show: (r) => I.count(r.missed_round) },
    { key: "missing", name: "missing", term: "missing", show: (r) => I.count(r.missing) },
    { key: "updates_rejected", name: "updates rejected", term: "rejected", show: (r) => I.count(r.updates_rejected) },
    { key: "weight_a_round", name: "weight a round", term: "weight_a_round", show: (r) => I.share(r.merged ? r.weight_a_round : null) },
    { key: "upload_s", name: "to send", term: "send", show: (r) => I.seconds(r.merged ? r.upload_s : null) },
    { key: "wait_s", name: "waited", term: "wait", show: (r) => I.seconds(r.merged ? r.wait_s : null) },
    { key: "clipped", name: "clipped", term: "clipped", show: (r) => I.count(r.clipped) },
    { key: "bytes_merged", name: "bytes merged", term: "bytes_merged", show: (r) => I.bytes(r.bytes_merged) },
    { key: "up", name: "up", term: "up", by: up, show: (r) => I.bytes(up(r)) },
    { key: "checkpoints", name: "checkpoints", term: "checkpoints", by: (r) => said(r, "checkpoint_bytes"), show: (r) => I.bytes(said(r, "checkpoint_bytes")) },
    { key: "down", name: "down", term: "down", by: (r) => said(r, "bytes_down"), show: (r) => I.bytes(said(r, "bytes_down")) },
  ];
  const rate = (r) => (r.said && !r.said.left && r.said.step_s && r.said.step ? r.said.tokens / r.said.step / r.said.step_s : null);

  I.LearnerPage = ({ name, state }) => {
    const at = I.where.at;
    const found = I.useAsk(`learner/${encodeURIComponent(name)}`, { at });
    const { from, to } = stretch();
    const lanes = I.useAsk("lanes", { from, to });
    return html`<h2>Learner <span class="mono">${name}</span></h2><${Answer} of=${found} what="its story">${(d) => html`
      <dl class="pair"><dt>State</dt><dd>${d.row.state || "not known"}</dd><dt><${Term} name="incarnation"/></dt><dd>${d.row.incarnation}</dd>
        <dt>Merged</dt><dd>${I.count(d.row.merged)} updates, ${I.short(d.row.tokens)} tokens, in ${I.share(d.row.participation)} of the rounds that expected it</dd>
        <dt>Missed their round, missing, rejected</dt><dd>${I.count(d.row.missed_round)}, ${I.count(d.row.missing)}, ${I.count(d.row.updates_rejected)} (and ${I.count(d.row.rejected_without_loss)} rejected without loss)</dd>
        <dt>In the mean</dt><dd>trains ${I.seconds(d.row.train_s)} for an update, sends it in ${I.seconds(d.row.upload_s)}, and it waits ${I.seconds(d.row.wait_s)} to be merged; ${I.share(d.row.weight_a_round)} of the weight of its rounds</dd>
        ${d.row.said ? html`<dt>Last said</dt><dd>step ${I.count(d.row.said.step)}, loss of its last step ${loss(d.row.said.loss)}, ${I.seconds(d.row.said.step_s)} a step, ${PARTS.map((p) => `${p} ${I.share(d.row.said[p] / Math.max(1, d.row.said.processed), 1)}`).join(", ")}</dd>` : null}</dl>
      <h3>Incarnations</h3><${Table} name="Incarnations" rows=${d.incarnations} first="incarnation" columns=${INCARNATIONS} empty="No update of this learner was merged yet: the first one begins this table."/>
      ${state.data && lanes.data ? html`<h3>Over time</h3><${Zoom} begin=${lanes.data.begin} end=${lanes.data.end} all=${[state.data.begin, state.data.end]}/><${I.Lanes} data=${lanes.data} mark=${at} only=${[name]}/>` : null}
      <h3>In the newest rounds</h3><${Table} name="Newest updates" rows=${d.story} first="at" descending columns=${STORY} empty="None of the newest rounds has an update of this learner: its next one appears here."/>`}</${Answer}>`;
  };
  const INCARNATIONS = [
    { key: "incarnation", name: "incarnation", term: "incarnation" }, { key: "began", name: "first step merged", left: true, show: (r) => I.date(r.began) },
    { key: "last", name: "last update taken", left: true, show: (r) => I.date(r.last) }, { key: "step", name: "from step", show: (r) => I.count(r.step) },
    { key: "away_s", name: "away before", show: (r) => (r.away_s === null ? "" : I.seconds(r.away_s)) },
  ];
  const STORY = [
    { key: "at", name: "written", left: true, show: (r) => html`<${I.TimeLink} at=${r.at}/>` },
    { key: "version", name: "commit", left: true, by: (r) => r.fragment, show: (r) => html`<${CommitLink} fragment=${r.fragment} version=${r.version}/>` },
    { key: "fate", name: "what became of it", left: true, show: (r) => (r.base === null ? r.fate : html`<${UpdateLink} fragment=${r.fragment} learner=${r.learner || I.where.words[1]} base=${r.base}>${r.fate}${r.reason ? ` (${r.reason})` : ""}</${UpdateLink}>`) },
    { key: "steps", name: "steps", show: (r) => (r.steps === undefined ? "" : I.count(r.steps)) },
    { key: "share", name: "weight", show: (r) => (r.share === undefined ? "" : I.share(r.share)) },
    { key: "upload_s", name: "to send", show: (r) => (r.upload_s === undefined ? "" : I.seconds(r.upload_s)) },
    { key: "wait_s", name: "waited", show: (r) => (r.wait_s === undefined ? "" : I.seconds(r.wait_s)) },
    { key: "missed_by_s", name: "missed by", show: (r) => (r.missed_by_s === undefined ? "" : I.seconds(r.missed_by_s)) },
  ];

  /* --- Fragments ----------------------------------------------------------------------------------------------- */

  I.FragmentsPage = ({ state }) => {
    const at = I.where.at;
    const { from, to } = stretch();
    const [what, setWhat] = useState("participation");
    const found = I.useAsk("fragments", { at, from, to });
    return html`<h2>Fragments</h2><${Answer} of=${found} what="fragments">${(d) => {
      const open = Object.fromEntries(((state.data && state.data.open) || []).map((x) => [x.fragment, x]));
      const rows = d.fragments.map((f) => ({ ...f, open: open[f.fragment] }));
      return html`
        ${state.data ? html`<${Zoom} begin=${d.begin} end=${d.end} all=${[state.data.begin, state.data.end]}/>` : null}
        <div class="controls"><label>Colour by <select value=${what} onChange=${(e) => setWhat(e.target.value)}>
          <option value="participation">participation: share of expected learners that were in</option><option value="age">age: how old the newest version was</option><option value="made">versions made</option></select></label></div>
        <${Heat} d=${d} what=${what} at=${at}/>
        <${Table} name="Fragments" rows=${rows} first="fragment" columns=${[
          { key: "fragment", name: "fragment", term: "fragment", left: true, by: (r) => r.fragment, show: (r) => html`<${Link} to=${`fragments/${r.fragment}`}>${r.fragment}</${Link}>` },
          { key: "version", name: "version", term: "version", show: (r) => html`<span data-version=${r.fragment}>${I.count(r.version)}</span>` },
          { key: "age_s", name: "age", term: "age", show: (r) => I.seconds(r.age_s) },
          { key: "size", name: "parameters", show: (r) => I.count(r.size) },
          { key: "open", name: "open round", left: true, by: (r) => (r.open ? r.open.version : -1), show: (r) => openRound(r.open) },
          { key: "broken", name: "damage", left: true },
        ]}/>`;
    }}</${Answer}>`;
  };
  const openRound = (open) => (!open ? "" : `${open.version}: ${open.waits_for === null ? "whom it waits for is not known" : open.waits_for.length ? `waits for ${open.waits_for.slice(0, 4).join(", ")}${open.waits_for.length > 4 ? ` and ${open.waits_for.length - 4} more` : ""}` : "all have answered"}`);

  const Heat = ({ d, what, at }) => {
    const names = d.fragments.map((f) => String(f.fragment));
    const columns = d.edges.length - 1;
    const ages = d.fragments.flatMap((f) => f.ages_s).filter(I.known).sort((a, b) => a - b);
    const oldest = ages[Math.floor(0.98 * (ages.length - 1))] || 1;
    const most = Math.max(1, ...d.fragments.flatMap((f) => f.made));
    const share = (f, k) => (what === "participation" ? f.participation[k] : what === "age" ? Math.min(1, f.ages_s[k] / oldest) : f.made[k] ? f.made[k] / most : null);
    const height = names.length > 40 ? 8 : 18;
    const paint = (ctx, n, y, h, x) => {
      const f = d.fragments[n], dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
      for (let k = 0; k < columns; k++) {
        const s = share(f, k);
        if (!I.known(s)) continue;
        ctx.fillStyle = I.shade(s, dark);
        ctx.fillRect(x(d.edges[k]), y + 0.5, x(d.edges[k + 1]) - x(d.edges[k]) + 0.6, h - 1);
      }
    };
    const cell = (t) => Math.min(columns - 1, Math.max(0, Math.floor(((t - d.begin) / (d.end - d.begin)) * columns)));
    const read = (n, t) => {
      const f = d.fragments[n], k = cell(t);
      return `${I.count(f.made[k])} versions made with ${I.count(f.inputs[k])} updates, ${I.share(f.participation[k])} of those expected were in, newest version ${I.seconds(f.ages_s[k])} old`;
    };
    const scale = what === "participation" ? ["0 %", "50 %", "100 %"] : what === "age" ? ["new", I.seconds(oldest / 2), `${I.seconds(oldest)} or older`] : ["1", I.count(most / 2), I.count(most)];
    const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    return html`<figure><figcaption>Fragments over time, by ${what === "made" ? "versions made" : what}</figcaption>
      <${I.Rows} title=${`Fragments by ${what}`} names=${names} height=${height} begin=${d.begin} end=${d.end} mark=${at} step=${(d.end - d.begin) / columns}
        paint=${paint} read=${read} open=${(n) => I.go(I.href(`fragments/${names[n]}`))} version=${`${what} ${d.end} ${d.fragments.reduce((a, f) => a + f.version, 0)}`}/>
      <${I.Legend} entries=${[...scale.map((word, k) => [html`<rect width="24" height="11" fill=${I.shade(k / 2, dark)}/>`, word]),
        ...(what === "age" ? [] : [[html`<rect x="0.5" y="0.5" width="23" height="10" fill="none" stroke="var(--line)"/>`, "no commit"]])]}/></figure>`;
  };

  I.FragmentPage = ({ p }) => {
    const found = I.useAsk(`fragment/${p}`, { at: I.where.at });
    return html`<h2>Fragment ${p}</h2><${Answer} of=${found} what="its rounds">${(d) => html`
      <dl class="pair"><dt><${Term} name="version"/></dt><dd>${I.count(d.row.version)}</dd><dt><${Term} name="age"/></dt><dd>${I.seconds(d.row.age_s)}</dd>
        <dt>Parameters</dt><dd>${I.count(d.row.size)}</dd><dt>Open round</dt><dd>${openRound(d.open) || "none"}</dd>${d.row.broken ? html`<dt>Damage</dt><dd>${d.row.broken}</dd>` : null}</dl>
      <h3>Its commits</h3><${CommitTable} d=${d}/>`}</${Answer}>`;
  };

  /* --- Commits and updates ------------------------------------------------------------------------------------- */

  const CommitTable = ({ d }) => html`<${Table} name="Commits" rows=${d.commits} first="written_at" descending empty="There is no such commit by this moment: choose all above, or a later moment." columns=${[
    { key: "version", name: "commit", term: "commit", left: true, by: (r) => r.fragment * 1e7 + r.version, show: (r) => html`<${CommitLink} ...${r}/>` },
    { key: "written_at", name: "written", left: true, show: (r) => html`<${I.TimeLink} at=${r.written_at}/>` },
    { key: "inputs", name: "updates", show: (r) => `${r.inputs}${r.fresh < r.inputs ? ` (${r.fresh} fresh)` : ""}` },
    { key: "expected", name: "expected" }, { key: "missing", name: "missing", term: "missing" }, { key: "missed_round", name: "missed round", term: "missed" }, { key: "updates_rejected", name: "updates rejected", term: "rejected" },
    { key: "closed_by", name: "closed by", term: "closed", left: true, show: (r) => (r.healed ? "healed" : `${r.closed_by}${r.quorum_missed ? ", quorum missed" : ""}`) },
    { key: "waited_s", name: "waited", show: (r) => I.seconds(r.waited_s) }, { key: "grace_s", name: "grace", term: "grace", show: (r) => I.seconds(r.grace_s) },
    { key: "period", name: "period", term: "period", show: (r) => I.number(r.period, 3) },
    { key: "tokens", name: "tokens, by share", term: "share", show: (r) => I.short(r.tokens) }, { key: "writer", name: "written by", left: true },
  ]}/>`;

  I.CommitsPage = ({ closings }) => {
    const { only = "", closed_by: closedBy = "", fragment = "", before = "" } = I.where.query;
    const found = I.useAsk("commits", { at: I.where.at, only, closed_by: closedBy, fragment, before });
    return html`<h2>Commits</h2><div class="controls">
      <label>Show <select value=${only} disabled=${I.offline} onChange=${(e) => I.withQuery({ only: e.target.value, before: "" })}><option value="">all</option><option value="missed">quorum missed</option><option value="missed_round">with updates that missed their round</option>
        <option value="rejected">with rejected updates</option><option value="missing">somebody was missing</option><option value="healed">that heal</option></select></label>
      <label>Closed by <select value=${closedBy} disabled=${I.offline} onChange=${(e) => I.withQuery({ closed_by: e.target.value, before: "" })}><option value="">anything</option>${closings.map((c) => html`<option value=${c}>${c}</option>`)}</select></label>
      <label>Fragment <input type="number" min="0" value=${fragment} disabled=${I.offline} onChange=${(e) => I.withQuery({ fragment: e.target.value, before: "" })}/></label></div>
      <${Answer} of=${found} what="commits">${(d) => html`<p class="note">${I.count(d.total)} commits, newest first.</p><${CommitTable} d=${d}/>
        <div class="controls"><button type="button" disabled=${d.before === null || I.offline} onClick=${() => I.withQuery({ before: d.before })}>Older</button>
        <button type="button" disabled=${!before} onClick=${() => I.withQuery({ before: "" })}>Newest</button></div>`}</${Answer}>`;
  };

  I.CommitPage = ({ p, version }) => {
    const found = I.useAsk(`commit/${p}/${version}`, null, { every: 60000 });
    return html`<h2>Commit ${p}/${version}</h2><${Answer} of=${found} what="the commit">${(d) => html`
      <div class="controls">${d.version > 1 ? html`← <${CommitLink} fragment=${d.fragment} version=${d.version - 1}/>` : null}
        ${d.version < d.newest ? html`<${CommitLink} fragment=${d.fragment} version=${d.version + 1}/> →` : null}
        <${Link} to=${`fragments/${d.fragment}`}>fragment ${d.fragment}</${Link}> <${Link} to="" at=${d.header.written_at}>the run as it was then</${Link}></div>
      <p class="note">Opened ${I.date(d.header.opened_at)}, written ${I.date(d.header.written_at)} by <code>${d.header.writer}</code>.</p>
      <${I.Round} round=${d.round} fragment=${d.fragment} version=${d.version}/>
      <h3>What it merged</h3><${Table} name="Updates merged" rows=${d.header.inputs} first="learner" empty="No update: this commit heals its fragment, or its round closed without any." columns=${[
        { key: "learner", name: "learner", left: true, show: (r) => html`<${LearnerLink} name=${r.learner}/>` },
        { key: "base", name: "update", left: true, show: (r) => html`<${UpdateLink} fragment=${d.fragment} learner=${r.learner} base=${r.base}>from version ${r.base}</${UpdateLink}>` },
        { key: "incarnation", name: "incarnation", term: "incarnation" }, { key: "steps", name: "steps" }, { key: "tokens", name: "tokens", show: (r) => I.count(r.tokens) },
        { key: "share", name: "weight", term: "weight", show: (r) => I.share(r.share, 1) }, { key: "bytes", name: "bytes", show: (r) => I.bytes(r.bytes) }, { key: "clipped", name: "clipped by", term: "clipped", left: true, by: (r) => r.clipped.join(), show: (r) => r.clipped.join(", ") }]}/>
      ${d.header.missed_round.length || d.header.rejections.length ? html`<h3>What it did not merge</h3><${Table} name="Updates not merged" first="learner" rows=${[...d.header.missed_round.map((x) => ({ ...x, why: "missed the round" })), ...d.header.rejections.map((x) => ({ ...x, why: `${x.reason}, ${x.count === 1 ? "once" : `${x.count} times`}` }))]} columns=${[
        { key: "learner", name: "learner", left: true, show: (r) => html`<${LearnerLink} name=${r.learner}/>` }, { key: "base", name: "update", left: true, show: (r) => html`<${UpdateLink} fragment=${d.fragment} learner=${r.learner} base=${r.base}>from version ${r.base}</${UpdateLink}>` }, { key: "why", name: "why", left: true }]}/>` : null}
      ${d.header.healed ? null : html`<${WhatIf} d=${d}/>`}
      <h3>In words, as <code>isthmus explain</code> tells it</h3><${Lines} lines=${d.lines}/>`}</${Answer}>`;
  };

  const WhatIf = ({ d }) => {
    const [set, setSet] = useState({ quorum: "", grace: "", merge: "" });
    const [found, setFound] = useState({ data: null, error: "", busy: false });
    const asked = Object.entries(set).filter(([, v]) => v !== "").map(([k, v]) => `${k}=${v}`);
    const go = async (event) => {
      event.preventDefault();
      setFound({ data: null, error: "", busy: true });
      try {
        setFound({ data: await I.ask(`whatif/${d.fragment}/${d.version}`, { set: asked }), error: "", busy: false });
      } catch (error) {
        setFound({ data: null, error: error.message, busy: false });
      }
    };
    const field = (name) => ({ value: set[name], onInput: (e) => setSet({ ...set, [name]: e.target.value }), onChange: (e) => setSet({ ...set, [name]: e.target.value }) });
    return html`<h3>What if?</h3><p class="note">This round, folded again under other rules from the state before it. Updates are as they were sent: learners would have trained otherwise later.</p>
      <form class="controls" id="whatif" onSubmit=${go}><label>Quorum <input type="number" min="1" placeholder=${d.round.quorum} ...${field("quorum")}/></label>
        <label>Grace (share of the slack) <input type="number" min="0" max="1" step="any" ...${field("grace")}/></label>
        <label>Merge <select ...${field("merge")}><option value="">${d.round.merge}, as it was</option>${["rda", "avg", "iso", "trimmed", "median"].filter((m) => m !== d.round.merge).map((m) => html`<option value=${m}>${m}</option>`)}</select></label>
        <button type="submit" class="main" disabled=${found.busy || !asked.length}>${found.busy ? "Folding …" : "Compute"}</button></form>
      ${found.error ? html`<div class="error" role="alert">${found.error}</div>` : null}
      ${found.data ? html`<dl class="pair" id="whatif-answer" aria-live="polite"><dt>Merged then</dt><dd>${found.data.recorded.join(", ")}</dd><dt>Merged with ${found.data.set.join(", ")}</dt><dd>${found.data.other.join(", ") || "nobody"}</dd>
        <dt>Closed after</dt><dd>${I.seconds(found.data.closed_other_s)} instead of ${I.seconds(found.data.closed_recorded_s)}</dd>
        <dt>The step of the model</dt><dd>${I.number(found.data.other_step)} long instead of ${I.number(found.data.step)}; the two versions are ${I.number(found.data.difference)} apart (${I.share(found.data.difference / found.data.step, 1)} of the step)</dd>
        <dt><${Term} name="cosine"/></dt><dd>${I.number(found.data.cosine, 4)} between the two steps</dd></dl>` : null}`;
  };

  I.UpdatePage = ({ p, learner, base }) => {
    const found = I.useAsk(`update/${p}/${encodeURIComponent(learner)}/${base}`, null, { every: 60000 });
    return html`<h2>Update of <span class="mono">${learner}</span> from version ${base} of fragment ${p}</h2><${Answer} of=${found} what="its story">${(d) => html`
      <div class="controls"><${LearnerLink} name=${d.learner}/> <${Link} to=${`fragments/${d.fragment}`}>fragment ${d.fragment}</${Link}>
        ${d.facts.version ? html`<span>merged into <${CommitLink} fragment=${d.fragment} version=${d.facts.version}/></span>` : html`<span>the round it was meant for: <${CommitLink} fragment=${d.fragment} version=${d.base + 1}/></span>`}</div>
      ${d.facts.seconds ? html`<dl class="pair">${Object.entries(d.facts.seconds).map(([k, v]) => html`<dt>${STEPS[k] || k}</dt><dd>${I.seconds(v)}</dd>`)}</dl>` : null}
      <${Lines} lines=${d.lines}/>`}</${Answer}>`;
  };
  const STEPS = { train: "Trained for", upload: "Packed and sent in", fetch: "Fetched and checked in", accumulate: "Accumulated in", wait: "Waited for the round to close", commit: "In the log after closing" };

  /* --- Syncers and services ------------------------------------------------------------------------------------ */

  I.ServicesPage = () => {
    const found = I.useAsk("services", { at: I.where.at });
    return html`<h2>Syncers and services</h2><${Answer} of=${found} what="services">${(d) => {
      const alive = new Map((d.alive || []).map((a) => [a.syncer, a]));
      const known = d.syncers.map((s) => ({ ...s, alive: alive.get(s.syncer) }));
      const fresh = (d.alive || []).filter((a) => !d.syncers.some((s) => s.syncer === a.syncer)).map((a) => ({ syncer: a.syncer, commits: 0, keeps: [], first_at: null, last_at: null, merge_s: null, publish_s: null, alive: a }));
      return html`
        <${Table} name="Syncers" rows=${[...known, ...fresh]} first="last_at" descending empty="No syncer has written a commit by this moment: a syncer appears with its first heartbeat or commit." columns=${[
          { key: "syncer", name: "syncer", term: "syncer", left: true, show: (r) => html`<code>${r.syncer}</code>` },
          { key: "state", name: "state", left: true, by: (r) => syncerState(r, d), show: (r) => syncerState(r, d) },
          { key: "commits", name: "commits", show: (r) => I.count(r.commits) }, { key: "keeps", name: "keeps fragments", left: true, by: (r) => r.keeps.length, show: (r) => ranges(r.keeps) },
          { key: "first_at", name: "first commit", left: true, show: (r) => I.date(r.first_at) }, { key: "last_at", name: "last commit", left: true, show: (r) => I.date(r.last_at) },
          { key: "merge_s", name: "merges in", show: (r) => I.seconds(r.merge_s) }, { key: "publish_s", name: "publishes in", show: (r) => I.seconds(r.publish_s) },
          { key: "lag", name: "loop lag", by: (r) => (r.alive ? r.alive.lag_ms : null), show: (r) => (r.alive ? I.seconds(r.alive.lag_ms / 1000) : "") }]}/>
        <h3>Store and bus</h3>
        <dl class="pair"><dt>Store answers this page in</dt><dd>${pair(d.store_ms)}</dd><dt>Bus answers this page in</dt><dd>${pair(d.bus_ms)}</dd></dl>
        <div class="charts"><${Chart} title="What a round takes after it has closed" unit="means" at=${d.lines.at} mark=${I.where.at} lines=${styled([{ name: "merging", noisy: true, values: d.lines.merge_s }, { name: "publishing", noisy: true, values: d.lines.publish_s }, { name: "closed to in the log", noisy: true, values: d.lines.commit_s }])} show=${I.seconds} none=${unmerged} note="Publishing and the log are the store's latency as syncers see it."/>
        <${Chart} title="Rounds wait" unit="means" at=${d.lines.at} mark=${I.where.at} lines=${styled([{ name: "from opening to closing", noisy: true, values: d.lines.waited_s }])} show=${I.seconds} none=${unmerged}/></div>
        <h3><${Term} name="takeover">Takeovers</${Term}></h3><${Table} name="Takeovers" rows=${d.takeovers} first="at" descending empty="No fragment has changed its keeper by this moment: a takeover appears when a syncer goes on for another one." columns=${[
          { key: "at", name: "last fragment at", left: true, show: (r) => I.date(r.at) }, { key: "from", name: "from", left: true }, { key: "to", name: "to", left: true },
          { key: "fragments", name: "fragments", left: true, by: (r) => r.fragments.length, show: (r) => ranges(r.fragments.map((f) => f.fragment).sort((a, b) => a - b)) },
          { key: "stood_s", name: "no commit for", by: (r) => r.stood_s.largest, show: (r) => `${I.seconds(r.stood_s.median)}, at most ${I.seconds(r.stood_s.largest)}` },
          { key: "longest", name: "longest", left: true, by: (r) => r.fragments[0].fragment, show: (r) => html`<${CommitLink} ...${r.fragments[0]}/>` }]}/>
        <h3>Learners that came back</h3><${Table} name="Restarts" rows=${d.restarts} first="began" descending empty="No learner was restarted by this moment: a restart appears with the first merged update after it." columns=${[
          { key: "began", name: "trains again from", left: true, show: (r) => I.date(r.began) }, { key: "learner", name: "learner", left: true, show: (r) => html`<${LearnerLink} name=${r.learner}/>` }, { key: "incarnation", name: "incarnation", term: "incarnation" }, { key: "step", name: "from step", show: (r) => I.count(r.step) }, { key: "away_s", name: "away for", show: (r) => I.seconds(r.away_s) }]}/>`;
    }}</${Answer}>`;
  };
  const unmerged = "No round has closed yet: the first commit begins this chart.";
  const syncerState = (r, d) => (r.alive ? (r.alive.stopping ? "stopped" : !r.alive.live ? "silent" : !r.alive.able ? "cannot serve for now" : r.alive.waiting_for ? `waits for ${r.alive.waiting_for}` : `lives, holds ${r.alive.held}`) : d.alive ? "gone" : "not known");
  const pair = (x) => (x === null ? "not known" : x.median === null ? "not measured yet" : `${I.seconds(x.median / 1000)} in the median, ${I.seconds(x.largest / 1000)} at most`);
  const ranges = (list) => {
    const found = [];
    for (const n of list) { const last = found[found.length - 1]; if (last && last[1] === n - 1) last[1] = n; else found.push([n, n]); }
    return found.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ") || "none";
  };

  /* --- About ---------------------------------------------------------------------------------------------------- */

  I.AboutPage = ({ run }) => html`<h2>About this run</h2><${Answer} of=${run} what="the run">${(d) => html`
    <dl class="pair"><dt>Run</dt><dd><code>${d.url}</code></dd><dt>Bus</dt><dd>${d.bus ? html`<code>${d.bus}</code>` : "none is read"}</dd><dt>Digest</dt><dd><code>${d.run}</code></dd><dt>Created</dt><dd>${I.date(d.created_at)}</dd><dt>Signed</dt><dd>${d.signed ? "yes" : "no: whoever reaches its store or bus can be anybody"}</dd>
      <dt>Model</dt><dd>${d.model || "not named"}, ${I.count(d.parameters)} parameters in ${d.fragments.length} fragments</dd></dl>
    <h3>Rules, which never change</h3><${Pairs} of=${d.rules}/><h3>Pace, as the run began</h3><${Pairs} of=${d.pace}/>
    <h3>Words</h3><dl class="pair" id="words">${Object.entries(I.terms).map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}</dl>`}</${Answer}>`;
  const Pairs = ({ of }) => html`<dl class="pair">${Object.entries(of).map(([k, v]) => html`<dt><code>${k}</code></dt><dd>${v === null ? "none" : typeof v === "object" ? JSON.stringify(v) : String(v)}</dd>`)}</dl>`;
})(window.Isthmus);
