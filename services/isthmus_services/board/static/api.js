/* Questions to the board: over HTTP and a stream of events, or from the answers that a file holds. */
"use strict";
(function (I) {
  const { useState, useEffect, useRef } = htmPreact;
  const held = document.getElementById("recorded");
  const recorded = held ? JSON.parse(held.textContent) : null;

  I.offline = recorded !== null;
  I.recorded = recorded;

  const listeners = new Set();
  I.live = { state: null, connection: recorded ? "file" : "connecting", lostAt: null, epoch: 0 };
  const tell = () => listeners.forEach((f) => f());

  /* The newest word of the server, and how the line to it is. */
  I.useLive = () => {
    const [, turn] = useState(0);
    useEffect(() => {
      const f = () => turn((n) => n + 1);
      listeners.add(f);
      return () => listeners.delete(f);
    }, []);
    return I.live;
  };

  /* A browser opens six connections to a server: a tab that nobody sees keeps none. */
  let events = null;
  const hear = () => {
    if (document.hidden && events) {
      events.close();
      events = null;
    } else if (!document.hidden && !events) I.listen();
  };
  if (!recorded) document.addEventListener("visibilitychange", hear);

  I.listen = () => {
    if (recorded) {
      I.live.state = recorded.answers.state;
      tell();
      return;
    }
    events = new EventSource("/api/events");
    events.onopen = () => { I.live.epoch += 1; };
    events.addEventListener("state", (event) => {
      I.live.state = JSON.parse(event.data);
      I.live.connection = "live";
      I.live.lostAt = null;
      tell();
    });
    events.onerror = () => {
      I.live.connection = "lost";
      I.live.lostAt = I.live.lostAt || Date.now() / 1000;
      tell();
      // Where the server answered with an error, a browser does not ask again by itself.
      if (events && events.readyState === EventSource.CLOSED) {
        events = null;
        setTimeout(() => { if (!events && !document.hidden) I.listen(); }, 2000);
      }
    };
  };

  const question = (path, query) => {
    const words = new URLSearchParams();
    for (const [name, value] of Object.entries(query || {}))
      for (const one of Array.isArray(value) ? value : [value])
        if (one !== null && one !== undefined && one !== "") words.append(name, one);
    const text = words.toString();
    return path + (text ? `?${text}` : "");
  };

  I.ask = async (path, query) => {
    if (recorded) return fromFile(path, query || {});
    let response;
    try {
      response = await fetch(`/api/${question(path, query)}`);
    } catch (error) {
      throw new Error("the board does not answer: is `isthmus board` still running?");
    }
    const answer = await response.json().catch(() => ({ error: `the board answered ${response.status}` }));
    if (!response.ok) throw new Error(answer.error || `the board answered ${response.status}`);
    return answer;
  };

  /* The file has the whole run as of its end, and the run, its learners and fragments at some moments of its past. */
  const WHOLE = ["series", "lanes", "run", "measured", "ledger"];
  const fromFile = (path, query) => {
    const live = "Ask `isthmus board RUN`.";
    if (path.startsWith("whatif")) throw new Error(`A file cannot fold the log again. ${live}`);
    if (query.only || query.closed_by || query.fragment || query.before) throw new Error(`A file does not filter commits. ${live}`);
    const asked = query.at === undefined || query.at === null || WHOLE.includes(path) || path.startsWith("commit/") || path.startsWith("update/") ? {} : { at: query.at };
    const found = recorded.answers[question(path, asked)];
    if (!found && path.startsWith("commit/")) throw new Error(`This file has the newest ${recorded.commits} commits, and this is none of them. ${live}`);
    if (!found && path.startsWith("update/")) throw new Error(`This file has no stories of single updates. ${live}`);
    if (!found && asked.at !== undefined) throw new Error(`This file has this page as of the run's end only: press End. ${live}`);
    if (!found) throw new Error(`This file does not hold that. ${live}`);
    if (found.error) throw new Error(found.error);
    return found;
  };
  I.nearest = (at) => {
    if (!recorded) return at;
    const before = recorded.moments.filter((m) => m <= at + 2e-3);
    return before.length ? before[before.length - 1] : recorded.moments[0];
  };

  /* An answer that is asked for again when the run has changed, at most every two seconds, as long as it is of now. */
  I.useAsk = (path, query, options) => {
    const { every = 2000, wanted = true } = options || {};
    const live = I.useLive();
    const key = question(path, query);
    const [found, set] = useState({ key: "", data: null, error: "" });
    const asked = useRef({ key: "", at: 0, turn: "", failed: false });
    const now = !query || query.at === undefined || query.at === null;
    const turn = live.state ? `${live.epoch} ${live.state.turn}` : "";
    useEffect(() => {
      if (!wanted) return undefined;
      const last = asked.current;
      const fresh = last.key === key;
      // Of the past nothing changes, but what could not be had, or was asked while the log was still being read.
      const settled = !now && !last.failed && !(live.state && live.state.reading);
      if (fresh && (last.turn === turn || settled || recorded)) return undefined;
      let gone = false;
      const wait = fresh ? Math.max(0, last.at + every - Date.now()) : 0;
      const timer = setTimeout(async () => {
        asked.current = { key, at: Date.now(), turn, failed: false };
        try {
          const data = await I.ask(path, query);
          if (asked.current.key === key) set({ key, data, error: "" });
        } catch (error) {
          asked.current.failed = true;
          if (asked.current.key === key) set((old) => ({ key, data: old.key === key ? old.data : null, error: error.message }));
        }
      }, wait);
      return () => { if (!gone) clearTimeout(timer); gone = true; };
    }, [key, turn, wanted]);
    return found.key === key ? found : { key, data: null, error: "" };
  };

  /* --- addresses: /at/TIME/page?query, or behind # in a file --------------------------------------------------- */

  const parse = () => {
    const text = recorded ? location.hash.replace(/^#/, "") || "/" : location.pathname + location.search;
    const [path, search] = text.split("?");
    let words, at = null, wrong = "";
    try {
      words = path.split("/").filter(Boolean).map(decodeURIComponent);
    } catch (error) {
      words = ["?"];
    }
    if (words[0] === "at") {
      at = I.moment(words[1] || "");
      if (at === null) wrong = words[1] || "";
      else if (recorded) at = I.nearest(at);
      words = words.slice(2);
    }
    return { at, wrong, words, query: Object.fromEntries(new URLSearchParams(search || "")) };
  };

  I.where = parse();
  I.href = (path, at = I.where.at, query = {}) => {
    const parts = (at === null ? [] : ["at", I.stamp(at)]).concat(path.split("/").filter(Boolean));
    const text = question("/" + parts.map((part) => encodeURIComponent(part).replaceAll("%3A", ":")).join("/"), query);
    return recorded ? `#${text}` : text;
  };
  I.go = (href, replace = false) => {
    if (recorded) {
      if (replace) history.replaceState(null, "", href);
      else location.hash = href.slice(1);
    } else if (replace) history.replaceState(null, "", href);
    else history.pushState(null, "", href);
    I.where = parse();
    tell();
  };
  I.path = () => I.where.words.join("/");
  I.withQuery = (changed) => I.go(I.href(I.path(), I.where.at, { ...I.where.query, ...changed }), true);
  window.addEventListener("popstate", () => { I.where = parse(); tell(); });
  window.addEventListener("hashchange", () => { I.where = parse(); tell(); });
})(window.Isthmus);
