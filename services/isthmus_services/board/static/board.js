/* The frame around the pages: which run, how the line to it is, the scrubber over its life, and the way between pages. */
"use strict";
(function (I) {
  const { html, render, useState, useEffect, useRef } = htmPreact;
  const PAGES = [["", "Run"], ["learners", "Learners"], ["fragments", "Fragments"], ["commits", "Commits"], ["services", "Syncers and services"], ["about", "About"]];
  const STEPS = 1000;

  const Connection = ({ live, run }) => {
    const past = I.where.at !== null;
    if (I.offline) return html`<span class="connection" id="connection">a file, written ${I.date(I.recorded.written_at)}</span>`;
    const words = { connecting: "connecting …", lost: `the board has not answered since ${I.clock(live.lostAt)}: what is shown is of then; trying again`, live: past ? "connected; the past is shown" : run && !run.has_bus ? "connected; the log alone is read" : "connected" };
    return html`<span class=${`connection ${live.connection}`} role="status" id="connection">${words[live.connection]}</span>`;
  };

  const Scrubber = ({ begin, end, over }) => {
    const at = I.where.at;
    const [held, hold] = useState(null);
    const timer = useRef(0);
    const shown = held !== null ? held : at === null ? end : at;
    const move = (t) => {
      const near = I.offline ? I.nearest(t) : t;
      hold(near);
      clearTimeout(timer.current);
      // At its end it is now again, and goes on with the run.
      const moment = t >= end - 1e-3 ? null : near;
      timer.current = setTimeout(() => { hold(null); I.go(I.href(I.path(), moment, I.where.query), true); }, 120);
    };
    const by = (steps) => move(Math.min(end, Math.max(begin, shown + (steps * (end - begin)) / STEPS)));
    const go = (event) => {
      event.preventDefault();
      const field = event.target.elements.when, t = I.moment(field.value.trim());
      field.setCustomValidity(t === null ? "Write it as 2026-11-21T14:30:00Z, or in seconds since 1970." : "");
      field.reportValidity();
      if (t !== null) move(Math.min(end, Math.max(begin, t)));
    };
    const value = Math.round(((shown - begin) / Math.max(end - begin, 1e-9)) * STEPS);
    return html`<section class=${`time ${at === null ? "" : "past"}`} aria-label="Time travel">
      <button type="button" aria-label="A little earlier" onClick=${() => by(I.offline ? -(STEPS / I.recorded.moments.length) : -1)}>◀</button>
      <input type="range" id="scrubber" min="0" max=${STEPS} step=${I.offline ? 1.02 * STEPS / I.recorded.moments.length : 1} value=${value} aria-label="Moment of the run's life" aria-valuetext=${at === null && held === null ? "now" : I.date(shown)}
        onInput=${(e) => move(begin + (Number(e.target.value) / STEPS) * (end - begin))}/>
      <button type="button" aria-label="A little later" onClick=${() => by(I.offline ? 1.5 * STEPS / I.recorded.moments.length : 1)}>▶</button>
      <output for="scrubber" id="moment">${at === null && held === null ? (I.offline ? `as of ${I.date(end)}` : `${over ? "its end so far" : "now"}, ${I.date(end)}`) : I.date(shown)}</output>
      <button type="button" class=${at === null ? "" : "main"} disabled=${at === null} onClick=${() => I.go(I.href(I.path(), null, I.where.query))}>${I.offline ? "End" : "Now"}</button>
      <form onSubmit=${go}><label class="hidden" for="when">Go to a time, as 2026-11-21T14:30:00Z</label><input type="text" id="when" name="when" size="20" onInput=${(e) => e.target.setCustomValidity("")} placeholder="2026-11-21T14:30:00Z"/> <button type="submit">Go</button></form>
    </section>`;
  };

  const Page = ({ state, run }) => {
    const [page = "", ...rest] = I.where.words;
    if (I.where.wrong) return html`<h2>There is no such moment</h2><p class="error">/at/${I.where.wrong}: write it as 2026-11-21T14:30:00Z, or in seconds since 1970.</p>`;
    if (page === "") return html`<${I.RunPage} state=${state}/>`;
    if (page === "learners" && rest.length === 1) return html`<${I.LearnerPage} key=${rest[0]} name=${rest[0]} state=${state}/>`;
    if (page === "learners" && !rest.length) return html`<${I.LearnersPage} state=${state}/>`;
    if (page === "fragments" && rest.length === 1) return html`<${I.FragmentPage} key=${rest[0]} p=${rest[0]}/>`;
    if (page === "fragments" && !rest.length) return html`<${I.FragmentsPage} state=${state}/>`;
    if (page === "commits" && rest.length === 2) return html`<${I.CommitPage} key=${rest.join("/")} p=${rest[0]} version=${rest[1]}/>`;
    if (page === "commits" && !rest.length) return html`<${I.CommitsPage} closings=${run.data ? run.data.closings : []}/>`;
    if (page === "updates" && rest.length === 3) return html`<${I.UpdatePage} key=${rest.join("/")} p=${rest[0]} learner=${rest[1]} base=${rest[2]}/>`;
    if (page === "services") return html`<${I.ServicesPage}/>`;
    if (page === "about") return html`<${I.AboutPage} run=${run}/>`;
    return html`<h2>There is no such page</h2><p><${I.Link} to="">The run</${I.Link}></p>`;
  };

  const Board = () => {
    const live = I.useLive();
    const run = I.useAsk("run", null, { every: 10000 });
    const at = I.where.at;
    const past = I.useAsk("state", { at }, { wanted: at !== null });
    const state = at === null ? { data: live.state, error: "" } : past;
    const bounds = live.state || (past.data ? past.data : null);
    const here = I.where.words[0] || "";
    const name = (PAGES.find(([p]) => p === here) || ["", "Isthmus"])[1];
    useEffect(() => { document.title = `${I.where.words.join(" ") || name} · ${run.data ? run.data.url.split("/").filter(Boolean).pop() : "Isthmus"}`; });
    return html`
      <a class="skip" href="#content" onClick=${(e) => { e.preventDefault(); document.getElementById("content").focus(); }}>Skip to the content</a>
      <header><div class="title"><h1>Isthmus</h1><span class="where mono">${run.data ? run.data.url : ""}</span><${Connection} live=${live} run=${run.data}/></div>
        <nav aria-label="Pages"><ul>${PAGES.map(([path, word]) => html`<li><${I.Link} to=${path} query=${{ from: I.where.query.from, to: I.where.query.to }} aria-current=${here === path || (here === "updates" && path === "commits") ? "page" : undefined}>${word}</${I.Link}></li>`)}</ul></nav>
        ${bounds ? html`<${Scrubber} begin=${bounds.begin} end=${Math.max(bounds.end, bounds.begin + 0.001)} over=${bounds.now - bounds.end > 60}/>` : null}</header>
      <main id="content" tabindex="-1"><${Page} state=${state} run=${run}/></main>
      <footer>It only reads. Times are those of the syncers' clocks, in this browser's zone; what is sent and merged is in the run's log, and the log alone counts. <${I.Link} to="about">What the words mean</${I.Link}></footer>`;
  };

  const root = document.getElementById("board");
  root.textContent = "";
  I.listen();
  render(html`<${Board}/>`, root);
})(window.Isthmus);
