/* How things are said: numbers with their units, dates with their zone, and what each term means. */
"use strict";
window.Isthmus = {};
(function (I) {
  const zone = new Intl.DateTimeFormat("en-GB", {
    day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short",
  });
  const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const none = "not known";

  const known = (x) => x !== null && x !== undefined && Number.isFinite(x);

  I.known = known;
  I.date = (s) => (known(s) ? zone.format(new Date(s * 1000)) : none);
  const day = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium" });
  I.span = (a, b) => { // the zone once, and the date once where it is the same
    const [first, last] = [a, b].map((s) => day.format(new Date(s * 1000)));
    return first === last ? `${first}, ${I.clock(a)} to ${I.clock(b)} ${I.date(b).split(" ").pop()}` : `${first}, ${I.clock(a)} to ${I.date(b)}`;
  };
  I.clock = (s) => (known(s) ? clock.format(new Date(s * 1000)) : none);
  I.count = (x) => (known(x) ? Math.round(x).toLocaleString("en") : none);
  I.share = (x, digits = 0) => (known(x) ? `${(100 * x).toFixed(digits)} %` : none);
  I.number = (x, digits = 3) => (known(x) ? Number(x.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 }) : none);
  I.usd = (x) => (known(x) ? `$${x < 1 ? x.toFixed(4) : x.toLocaleString("en", { maximumFractionDigits: 2 })}` : none);

  I.short = (x) => {
    if (!known(x)) return none;
    if (Math.abs(x) >= 1e15) return x.toExponential(1);
    for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(x) >= size) return `${Number((x / size).toPrecision(3))} ${name}`;
    return `${Number(x.toPrecision(3))}`;
  };
  I.bytes = (x) => (known(x) ? `${I.short(x)}${Math.abs(x) >= 1e3 ? "B" : " B"}` : none);

  I.seconds = (s) => {
    if (!known(s)) return none;
    const a = Math.abs(s);
    if (a > 0 && a < 0.01) return `${Number((s * 1000).toPrecision(2))} ms`;
    if (a < 1) return `${Math.round(s * 1000)} ms`;
    if (a < 120) return `${Number(s.toPrecision(3))} s`;
    if (a < 7200) return `${(s / 60).toFixed(1)} min`;
    if (a < 172800) return `${(s / 3600).toFixed(1)} h`;
    return `${(s / 86400).toFixed(1)} days`;
  };

  /* A moment as an address has it, and back; null for what is no time. */
  I.stamp = (s) => new Date(Math.ceil(s * 1000)).toISOString(); // not before what was written then
  I.moment = (text) => {
    const s = /^\d{9,}(\.\d+)?$/.test(text) ? Number(text) : /^\d{4}-/.test(text) ? Date.parse(text) / 1000 : NaN;
    return Number.isFinite(s) && Math.abs(s) < 1e11 ? s : null;
  };

  I.terms = {
    fragment: "A part of the model. Each fragment is sent, merged and published by itself, so that no update is large.",
    version: "How often a fragment was merged. Version 0 is what the run began with.",
    round: "The making of one new version of one fragment: learners are called, their updates are waited for, and merged.",
    update: "What a learner has changed in a fragment since the version that it began from, packed into few bits.",
    commit: "The record that makes a round count: who was merged, with which weights, and what came out. It never changes.",
    quorum: "How many fresh updates a round waits for before its grace begins.",
    period: "How many steps a learner takes between two uploads of one fragment. Where rounds take long, it is longer than the rules say.",
    grace: "How much longer a round waits for more learners once its quorum is there. It is taken from the slack that all of them have.",
    fresh: "An update that began from the newest version, not from an older one.",
    missed: "Said of an update that was not in its round: it was heard of when that had closed, or its bytes came too late. The next round may still merge it.",
    late: "In updates that came too late for any round.",
    rejected: "An update that a syncer turned away for good: its work is in no version. The ledger has it as rejected or late.",
    repeated: "A rejection by which no work is lost: the update or one that holds its work waits or was merged, or its loss was counted before, or it may still be merged.",
    missing: "A learner that a round expected and that, when it closed, had sent no update on the newest version and had not passed. An older update of it may be in the commit.",
    participation: "Of the learners that a round expected, or that were in nevertheless, the share that is in its commit: the mean over commits.",
    kept: "Of the tokens that learners had processed up to their newest merged updates, the share that was merged. The log knows no later ones.",
    ledger: "Where the tokens went that a learner has processed: merged, overwritten by a new version, late, pending, rejected (in rejected updates, or sent after a shorter update on the same base was merged), lost.",
    overwritten: "Trained between sending an update and adopting the version that came of it, and replaced by that.",
    pending: "Trained, and not settled yet: in an update under way, or not sent yet.",
    lost: "Trained after the last checkpoint or update, and gone when the learner was killed.",
    incarnation: "A learner's time from one start to the next: it goes on where its checkpoint stands.",
    age: "How long ago the newest version of a fragment was written.",
    syncer: "A process that opens rounds, merges updates and writes commits. Any number may run; each keeps some of the fragments.",
    takeover: "A fragment's keeper was gone, and another syncer went on with it.",
    loss: "How well a model predicts its text: lower is better. A learner's own, on what it trains with; in a table, of its last step as it says; «(merged)» marks the mean in its newest merged update, where it says none.",
    losses: "How well a learner's model predicts the text that it trains with: lower is better. Each merged update states the mean over its steps, so the curve covers the whole run; no last step of a heartbeat is in it.",
    tokens: "Pieces of text that were trained on. Those of an update count by its fragment's share of the model.",
    cosine: "How alike two directions are: 1 is the same, 0 has nothing in common, −1 is the opposite.",
    weight_a_round: "How much its updates counted in a round that merged it, in the mean over those rounds: each round counts alike. The weight share of an audit is of the sum over all rounds.",
    weight: "How much its update counted in a round: tokens² / steps, as a share of all that were merged.",
    send: "From the step at which it was taken until a syncer heard of it: packing and upload.",
    wait: "From being accumulated until its round closed.",
    state: "What a learner is doing, as far as it is heard: training, waiting for something it cannot reach, behind and fetching, silent, left, done.",
    closed: "Why a round closed: everyone was in, its grace was over, it had waited as long as it may, …",
    clipped: "Counted for less than it said; an update counts once, whatever its reasons. steps: more than there was time for; tokens: far more a step than others; weight: far above the median; norm: far longer than what came lately, and shortened; short: far shorter than that.",
    slack: "The time in which a new version can come back before learners have to do without it: the overlap's steps, less what sending takes.",
    boundary: "The end of an optimizer step: where an update is taken, and a new version adopted.",
    merged: "Its updates that are in a version. Some learners are in a round twice: late with the last one's, and with this one's.",
    expected: "Rounds that counted on it: it was heard of, or had come lately.",
    step: "How many optimizer steps it has done, over all its incarnations; then how many it is to do.",
    rate: "Tokens it trains a second, as it says.",
    processed: "What learners had trained on up to their newest merged updates, over all incarnations: what was trained again after a kill counts each time. What came after the newest merged update is not in it; the ledger, from heartbeats, has that too.",
    up: "What it has sent to the store over all its incarnations, without checkpoints, as it says.",
    bytes_merged: "The updates that were merged, as learners packed them, without headers. What was sent and not merged is not in it.",
    checkpoints: "The checkpoints that it has sent to the store, over all its incarnations.",
    down: "What it has fetched from the store over all its incarnations.",
    share: "An update of one fragment holds the same tokens as those of the others: each counts them by the fragment's share of the model.",
    checkpoint: "What a learner stores of its own state, so that it can go on after a kill.",
  };
})(window.Isthmus);
