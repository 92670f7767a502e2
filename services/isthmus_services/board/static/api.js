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

  I.listen = () => {
    if (recorded) {
      I.live.state = recorded.answers.state;
      tell();
      return;
    }
    const events = new EventSource("/api/events");
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
      if (events.readyState === EventSource.CLOSED) setTimeout(I.listen, 2000);
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

  /* The file has all of the whole run, and some moments of its past: the one at or before that was asked for. */
  const fromFile = (path, query) => {
    const asked = {};
    if (query.at !== undefined && query.at !== null) asked.at = I.nearest(query.at);
    const found = recorded.answers[question(path, asked)] || (asked.at !== undefined && stale(path));
    if (!found) {
      if (path.startsWith("whatif")) throw new Error("a file cannot fold the log again: ask `isthmus board RUN`");
      throw new Error(`this file does not hold that: it has the newest ${recorded.commits} commits. Ask \`isthmus board RUN\``);
    }
    if (found.error) throw new Error(found.error);
    return found;
  };
  const stale = (path) => {
    const whole = ["series", "lanes", "commits", "services", "run", "measured", "ledger"];
    return whole.includes(path) || path.startsWith("fragment/") ? recorded.answers[path] : null;
  };
  I.nearest = (at) => {
    if (!recorded) return at;
    const before = recorded.moments.filter((m) => m <= at + 1e-6);
    return before.length ? before[before.length - 1] : recorded.moments[0];
  };

  /* An answer that is asked for again when the run has changed, at most every two seconds, as long as it is of now. */
  I.useAsk = (path, query, options) => {
    const { every = 2000, wanted = true } = options || {};
    const live = I.useLive();
    const key = question(path, query);
    const [found, set] = useState({ key: "", data: null, error: "" });
    const asked = useRef({ key: "", at: 0, turn: "" });
    const now = !query || query.at === undefined || query.at === null;
    const turn = live.state ? `${live.epoch} ${live.state.turn}` : "";
    useEffect(() => {
      if (!wanted) return undefined;
      const last = asked.current;
      const fresh = last.key === key;
      if (fresh && (last.turn === turn || !now || recorded)) return undefined;
      let gone = false;
      const wait = fresh ? Math.max(0, last.at + every - Date.now()) : 0;
      const timer = setTimeout(async () => {
        asked.current = { key, at: Date.now(), turn };
        try {
          const data = await I.ask(path, query);
          if (asked.current.key === key) set({ key, data, error: "" });
        } catch (error) {
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
    let words = path.split("/").filter(Boolean).map(decodeURIComponent);
    let at = null;
    if (words[0] === "at") {
      at = I.moment(words[1] || "");
      words = words.slice(2);
    }
    return { at, words, query: Object.fromEntries(new URLSearchParams(search || "")) };
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
