/* Lines over time (uPlot) and pictures with a row for each thing (canvas). Colours differ in lightness too, and lines in
   their dashes: nothing is told by hue alone. Each picture can be read without seeing it. */
"use strict";
(function (I) {
  const { html, useState, useEffect, useRef } = htmPreact;

  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 4]];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  I.css = css;

  /* Draw again where the window or its colours change. */
  I.useLook = (box) => {
    const [look, set] = useState({ width: 0, dark: false });
    useEffect(() => {
      const dark = window.matchMedia("(prefers-color-scheme: dark)");
      const see = () => {
        const width = box.current ? Math.floor(box.current.clientWidth) : 0;
        set((old) => (old.width === width && old.dark === dark.matches ? old : { width, dark: dark.matches }));
      };
      const observer = new ResizeObserver(see);
      if (box.current) observer.observe(box.current);
      dark.addEventListener("change", see);
      see();
      return () => { observer.disconnect(); dark.removeEventListener("change", see); };
    }, []);
    return look;
  };

  /* Values that no line shows, having no neighbour: they are drawn as points. */
  const alone = (line) => {
    const there = line.values.map((v, k) => (I.known(v) ? k : -1)).filter((k) => k >= 0);
    if (line.join) return there.length === 1 ? there : [];
    return there.filter((k) => !I.known(line.values[k - 1]) && !I.known(line.values[k + 1]));
  };

  /* The figure of a line at the moment that is shown, or its last one. */
  const shown = (values, at, mark) => {
    let k = values.length - 1;
    if (I.known(mark)) while (k > 0 && at[k] > mark) k -= 1;
    while (k > 0 && !I.known(values[k])) k -= 1;
    return values[k];
  };

  /* The mean of the known values in a window of `width` points around each one; unknown where none is known. */
  const smoothed = (values, width) => {
    const half = Math.floor(width / 2);
    return values.map((_, k) => {
      const there = values.slice(Math.max(0, k - half), k + half + 1).filter(I.known);
      return there.length ? there.reduce((a, b) => a + b, 0) / there.length : null;
    });
  };
  /* Powers of ten for a logarithmic axis, few enough. */
  const decades = (low, high) => {
    const first = Math.ceil(Math.log10(low) - 1e-9), count = Math.floor(Math.log10(high) + 1e-9) - first + 1, step = Math.ceil(count / 6);
    return Array.from({ length: Math.ceil(count / step) }, (_, n) => 10 ** (first + n * step));
  };
  const FEWEST = 20; // points from which a line is smoothed

  const told = (line, show) => {
    const there = line.values.filter(I.known);
    if (!there.length) return `${line.name}: not known`;
    return `${line.name}: last ${show(there[there.length - 1])}, least ${show(Math.min(...there))}, most ${show(Math.max(...there))}`;
  };

  /* lines: [{name, values, noisy}] over `at` [seconds since 1970]; `show` says a value with its unit; `mark`: a moment.
     `quantity`: what the values are, for the legend, where the lines have names of learners or series.
     Values of a noisy line are drawn faintly, under their moving mean. `none` says why no value is known, and what gives one. */
  I.Chart = ({ title, term, unit, quantity, at, lines, show, mark, span, zero = true, max, note, none, onZoom }) => {
    const box = useRef(null), readout = useRef(null);
    const look = I.useLook(box);
    const width = 2 * Math.ceil(at.length / 40) + 1, each = (at[at.length - 1] - at[0]) / (at.length - 1);
    // Values of very different sizes, such as losses that explode, are told apart on a logarithmic axis only. There a
    // mean would show the large ones before they come.
    const all = lines.flatMap((l) => l.values).filter(I.known).sort((a, b) => a - b);
    const log = !zero && all.length > 0 && all[0] > 0 && all[all.length - 1] > 50 * all[Math.floor(all.length / 4)];
    const some = lines.filter((l) => l.values.some(I.known)).map((l) => {
      const smooth = l.noisy && !log && l.values.filter(I.known).length >= FEWEST;
      return { ...l, smooth, drawn: smooth ? smoothed(l.values, width) : l.values };
    });
    const faint = some.filter((l) => l.smooth);
    const signature = `${at.length} ${at[0]} ${at[at.length - 1]} ${some.map((l) => l.name + l.values.filter(I.known).length).join()} ${JSON.stringify(some.map((l) => l.values.slice(-3)))}`;
    useEffect(() => {
      if (!box.current || !look.width || !some.length) return undefined;
      const text = css("text"), grid = css("line");
      const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
      const plot = new uPlot({
        width: look.width, height: 190, cursor: { drag: { x: !!onZoom, y: false }, points: { size: 6 } }, legend: { show: false },
        scales: {
          x: { time: true, range: span ? () => [span[0], Math.max(span[1], span[0] + 1)] : undefined },
          y: log ? { distr: 3 } : { range: (_, low, high) => {
            const top = max !== undefined ? max : high > (zero ? 0 : low) ? high + 0.06 * (high - (zero ? 0 : low)) : high + 1;
            return [zero ? Math.min(0, low) : low - 0.06 * (high - low || 1), top];
          } },
        },
        axes: [{ ...axis, space: 70, size: (_, words) => ((words || []).some((w) => w.includes("\n")) ? 50 : 34), splits: (u) => I.timeTicks(u.scales.x.min, u.scales.x.max, Math.max(2, u.bbox.width / devicePixelRatio / 70)).map((t) => t[0]),
          values: (u, ticks) => I.timeTicks(u.scales.x.min, u.scales.x.max, Math.max(2, u.bbox.width / devicePixelRatio / 70)).map(([, word, day]) => (day ? `${word}\n${day}` : word)).slice(0, ticks.length) }, { ...axis, size: 64, values: (_, ticks) => ticks.map(show), ...(log ? { splits: (u) => decades(u.scales.y.min, u.scales.y.max), filter: (_, ticks) => ticks } : {}) }],
        series: [{}, ...faint.map((line) => ({ stroke: `${css(`c${line.color}`)}55`, width: 1, spanGaps: !!line.join, points: { show: false } })),
          ...some.map((line) => ({
            label: line.name, stroke: css(`c${line.color}`), width: 2, dash: DASHES[line.dash], spanGaps: !!line.join,
            points: { show: true, size: 4, filter: () => alone(line) },
          }))],
        hooks: {
          setCursor: [(u) => {
            const k = u.cursor.idx;
            if (readout.current) readout.current.textContent = k === null || k === undefined ? "" : `${I.date(at[k])}: ${some.map((l) => `${l.name}${quantity ? `: ${quantity}` : ""} ${show(l.values[k])}${l.smooth ? ` (mean ${show(l.drawn[k])})` : ""}`).join(", ")}`;
          }],
          draw: [(u) => {
            if (!I.known(mark)) return;
            const x = u.valToPos(mark, "x", true);
            if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
            u.ctx.save();
            u.ctx.setLineDash([]);
            u.ctx.strokeStyle = css("late");
            u.ctx.lineWidth = 2 * devicePixelRatio;
            u.ctx.beginPath();
            u.ctx.moveTo(x, u.bbox.top);
            u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
            u.ctx.stroke();
            u.ctx.restore();
          }],
          setSelect: [(u) => {
            if (!onZoom || u.select.width < 8) return;
            onZoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          }],
        },
      }, [at, ...faint.map((l) => l.values), ...some.map((l) => l.drawn)], box.current);
      return () => plot.destroy();
    }, [look.width, look.dark, signature, mark, span && span.join()]);
    const said = some.map((line) => told(line, show)).join("; ");
    return html`<figure><figcaption>${term ? html`<${I.Term} name=${term}>${title}</${I.Term}>` : title}${unit ? ` [${unit}]` : ""}${log ? ", on a logarithmic axis" : ""}</figcaption>
      ${some.length
        ? html`<div class="chart" ref=${box} role="img" aria-label=${`${title} over time. ${said}`}></div>
            <${I.Legend} entries=${some.map((line) => [
              html`<line x1="0" x2="24" y1="5.5" y2="5.5" stroke=${`var(--c${line.color})`} stroke-width="3" stroke-dasharray=${DASHES[line.dash].join(" ")}/>`,
              `${line.name}${quantity ? `: ${quantity}` : ""} ${show(shown(line.values, at, mark))}`])}/>
            ${faint.length ? html`<p class="note">Bold: mean over ${I.seconds(width * each)}. Faint, and the numbers beside the names: each ${I.seconds(each)}.</p>` : null}
            ${note ? html`<p class="note">${note}</p>` : null}<p class="readout" ref=${readout}></p>`
        : html`<div ref=${box}></div><p class="note">${none}</p>`}</figure>`;
  };
  /* Give lines their colours and dashes. */
  I.styled = (lines) => lines.map((line, n) => ({ color: n % 8, dash: n % 8 === n ? n % DASHES.length : (n + 1) % DASHES.length, ...line }));

  /* --- a picture with rows ------------------------------------------------------------------------------------- */

  /* Ticks of a time axis, in round steps and few enough: [time, time of day, date]. The date is empty where the tick
     before it has the same, or all ticks have; where steps are days, the first text is the date. */
  I.timeTicks = (begin, end, most) => {
    const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000];
    const step = steps.find((s) => (end - begin) / s <= most) || 31536000;
    const shift = step >= 3600 ? new Date(begin * 1000).getTimezoneOffset() * 60 : 0;
    const ticks = [];
    for (let t = Math.ceil((begin - shift) / step) * step + shift; t <= end; t += step) ticks.push(t);
    const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: step > 604800 ? "numeric" : undefined });
    const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), ...(step < 1 ? { fractionalSecondDigits: 1 } : {}) });
    const days = [begin, ...ticks].map((t) => date.format(new Date(t * 1000)));
    if (step >= 86400) return ticks.map((t, n) => [t, days[n + 1], ""]);
    const several = days[0] !== date.format(new Date(end * 1000));
    return ticks.map((t, n) => [t, clock.format(new Date(t * 1000)), several && (n === 0 || days[n + 1] !== days[n]) ? days[n + 1] : ""]);
  };

  /* Rows over time on a canvas. paint(ctx, row, y, height, x(t), left, right); read(row, t) says what is there; open(row, t)
     follows it. Arrow keys move a cursor over it, Enter opens what it is on. */
  I.Rows = ({ title, names, height, begin, end, mark, paint, read, open, step, version }) => {
    const box = useRef(null), canvas = useRef(null);
    const look = I.useLook(box);
    const [cursor, setCursor] = useState(null);
    const label = Math.min(150, Math.max(36, 7.2 * Math.max(...names.map((n) => n.length), 1) + 12));
    const left = look.width < 480 ? Math.min(label, 90) : label;
    const x = (t) => left + ((t - begin) / Math.max(end - begin, 1e-9)) * (look.width - left - 4);
    const ticks = look.width ? I.timeTicks(begin, end, Math.max(2, Math.floor((look.width - left) / 70))) : [];
    const total = names.length * height + (ticks.some(([, , day]) => day) ? 42 : 26);
    useEffect(() => {
      if (!canvas.current || !look.width) return;
      const ratio = devicePixelRatio || 1, c = canvas.current;
      c.width = look.width * ratio;
      c.height = total * ratio;
      c.style.height = `${total}px`;
      const ctx = c.getContext("2d");
      ctx.scale(ratio, ratio);
      ctx.font = "12px system-ui, sans-serif";
      ctx.textBaseline = "middle";
      const text = css("text"), line = css("line");
      ticks.forEach(([t, ...words]) => {
        ctx.fillStyle = line;
        ctx.fillRect(x(t), 0, 1, names.length * height + 4);
        ctx.fillStyle = text;
        ctx.textAlign = "center";
        words.forEach((word, n) => {
          const half = ctx.measureText(word).width / 2;
          ctx.fillText(word, Math.min(look.width - half, Math.max(left + half, x(t))), names.length * height + 15 + 16 * n);
        });
      });
      names.forEach((name, n) => {
        ctx.save();
        ctx.beginPath();
        ctx.rect(left, n * height, look.width - left, height);
        ctx.clip();
        paint(ctx, n, n * height, height, x, left, look.width);
        ctx.restore();
        if (height >= 11 || n % Math.ceil(12 / height) === 0) {
          ctx.fillStyle = text;
          ctx.textAlign = "right";
          let shown = name;
          while (shown.length > 2 && ctx.measureText(shown).width > left - 8) shown = `${shown.slice(0, -2)}…`;
          ctx.fillText(shown, left - 6, n * height + height / 2);
        }
      });
      if (I.known(mark) && mark >= begin && mark <= end) {
        ctx.fillStyle = css("late");
        ctx.fillRect(x(mark) - 1, 0, 2, names.length * height);
      }
      if (cursor) {
        ctx.strokeStyle = css("focus");
        ctx.lineWidth = 2;
        ctx.strokeRect(x(cursor.t) - 4, cursor.row * height + 1, 8, height - 2);
      }
    }, [look.width, look.dark, version, begin, end, mark, cursor, names.join("\n")]);
    const at = (event) => {
      const r = canvas.current.getBoundingClientRect();
      const row = Math.floor((event.clientY - r.top) / height);
      const t = begin + ((event.clientX - r.left - left) / Math.max(1, look.width - left - 4)) * (end - begin);
      return row >= 0 && row < names.length && t >= begin && t <= end ? { row, t } : null;
    };
    const keys = (event) => {
      const now = cursor || { row: 0, t: end - step };
      const moved = { ArrowLeft: [0, -step], ArrowRight: [0, step], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (moved) {
        event.preventDefault();
        setCursor({ row: Math.min(names.length - 1, Math.max(0, now.row + moved[0])), t: Math.min(end, Math.max(begin, now.t + moved[1])) });
      } else if (event.key === "Enter" && cursor && open) open(cursor.row, cursor.t);
      else if (event.key === "Escape") setCursor(null);
    };
    return html`<div class="canvas" ref=${box}>
      <canvas ref=${canvas} tabindex="0" role="application" aria-roledescription="picture of rows over time"
        aria-label=${`${title}: ${names.length} rows from ${I.date(begin)} to ${I.date(end)}. Arrow keys move over it, Enter opens.`}
        onKeyDown=${keys} onMouseMove=${(e) => setCursor(at(e))} onMouseLeave=${() => setCursor(null)}
        onClick=${(e) => {
          const p = at(e), touch = window.matchMedia("(hover: none)").matches;
          const same = p && cursor && p.row === cursor.row && Math.abs(p.t - cursor.t) < (end - begin) / 12;
          if (p && open && (!touch || same)) open(p.row, p.t);
          else setCursor(p);
        }}></canvas>
      <p class="readout" aria-live="polite">${cursor ? `${names[cursor.row]}, ${I.date(cursor.t)}: ${read(cursor.row, cursor.t)}` : "Point at it, or move over it with the arrow keys."}</p>
    </div>`;
  };

  /* One hue from light to dark (in the dark from dark to light): readable in grey. share: 0 to 1. */
  I.shade = (share, dark) => {
    const s = Math.min(1, Math.max(0, share));
    const [from, to] = dark ? [[32, 42, 54], [150, 220, 255]] : [[226, 236, 246], [4, 60, 110]];
    return `rgb(${from.map((f, n) => Math.round(f + s * (to[n] - f))).join()})`;
  };
})(window.Isthmus);
