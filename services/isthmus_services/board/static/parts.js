/* Pieces that several pages are made of. Texts are set as text, never as markup: names in a run are anybody's words. */
"use strict";
(function (I) {
  const { html, useState, useMemo, useRef, useEffect } = htmPreact;

  /* A link to a page at the moment that is shown. */
  I.Link = ({ to, at, query, children, ...rest }) => {
    const href = I.href(to, at === undefined ? I.where.at : at, query);
    const click = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      I.go(href);
      window.scrollTo(0, 0);
    };
    return html`<a href=${href} onClick=${click} ...${rest}>${children}</a>`;
  };

  /* A term, with what it means at hand: by click, touch or Enter. */
  I.Term = ({ name, children }) => html`<details class="term"><summary>${children || name}</summary><span>${I.terms[name]}</span></details>`;

  I.CommitLink = ({ fragment, version }) => html`<${I.Link} to=${`commits/${fragment}/${version}`}>${fragment}/${version}</${I.Link}>`;
  I.UpdateLink = ({ fragment, learner, base, children }) =>
    html`<${I.Link} to=${`updates/${fragment}/${learner}/${base}`}>${children || `${fragment}/${learner}/${base}`}</${I.Link}>`;
  I.LearnerLink = ({ name }) => html`<${I.Link} to=${`learners/${name}`}>${name}</${I.Link}>`;
  I.TimeLink = ({ at }) => html`<${I.Link} to=${I.path()} at=${at} title="show this page as it was then">${I.date(at)}</${I.Link}>`;

  I.Answer = ({ of, children, what }) => {
    if (of.error) return html`<div class="error" role="alert">${of.error}${of.data ? " What follows is older." : ""}</div>${of.data && children(of.data)}`;
    if (!of.data) return html`<p class="note" role="status">Asking for ${what} …</p>`;
    return children(of.data);
  };

  I.Tile = ({ term, name, value, more }) => html`
    <div class="tile"><dt>${term ? html`<${I.Term} name=${term}>${name}</${I.Term}>` : name}</dt>
    <dd class="value">${value}</dd>${more ? html`<dd class="more">${more}</dd>` : null}</div>`;

  /* A table that sorts by any column. columns: {key, name, term, left, show(row), by(row)}. */
  I.Table = ({ name, columns, rows, first, descending = false, empty }) => {
    const [order, set] = useState({ key: first || columns[0].key, down: descending });
    const sorted = useMemo(() => {
      const column = columns.find((c) => c.key === order.key) || columns[0];
      const by = column.by || ((row) => row[column.key]);
      const value = (row) => { const v = by(row); return v === null || v === undefined ? (typeof v === "string" ? "" : -Infinity) : v; };
      return [...rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const way = typeof x === "string" && typeof y === "string" ? x.localeCompare(y, "en", { numeric: true }) : x < y ? -1 : x > y ? 1 : 0;
        return order.down ? -way : way;
      });
    }, [rows, order]);
    if (!rows.length) return html`<p class="note">${empty}</p>`;
    return html`<${Wide} name=${name} count=${columns.length}><table><caption class="hidden">${name}</caption>
      <thead><tr>${columns.map((c) => html`
        <th class=${c.left ? "left" : ""} scope="col" aria-sort=${order.key === c.key ? (order.down ? "descending" : "ascending") : "none"}>
          <button type="button" onClick=${() => set({ key: c.key, down: order.key === c.key ? !order.down : !c.left })}
            title=${c.term ? I.terms[c.term] : `sort by ${c.name}`}>${c.name}</button></th>`)}</tr></thead>
      <tbody>${sorted.map((row) => html`<tr>${columns.map((c) => html`<td class=${c.left ? "left" : ""}>${c.show ? c.show(row) : row[c.key]}</td>`)}</tr>`)}</tbody>
    </table></${Wide}>${explained(columns)}`;
  };

  /* What is around a table: it scrolls sideways where the table is wider than the page, and then says so. */
  const Wide = ({ name, count, children }) => {
    const box = useRef(null);
    const [cut, set] = useState(false);
    useEffect(() => {
      const see = () => { if (box.current) set(box.current.scrollWidth > box.current.clientWidth + 1); };
      const observer = new ResizeObserver(see);
      observer.observe(box.current);
      observer.observe(box.current.firstElementChild);
      see();
      return () => observer.disconnect();
    }, []);
    return html`${cut ? html`<p class="note sideways">${count} columns: scroll the table sideways for those that do not fit.</p>` : null}
      <div class="wide" ref=${box} tabindex="0" role="region" aria-label=${name}>${children}</div>`;
  };

  /* What the heads of a table mean, where everybody can get at it: also who has no pointer to hold over them. */
  const explained = (columns) => {
    const terms = columns.filter((c) => c.term);
    return terms.length ? html`<details class="columns"><summary>What the columns mean</summary><dl class="pair">
      ${terms.map((c) => html`<dt>${c.name}</dt><dd>${I.terms[c.term]}</dd>`)}</dl></details>` : null;
  };

  I.Lines = ({ lines }) => html`<ul class="plain">${lines.map((line) => html`<li>${line}</li>`)}</ul>`;

  I.Legend = ({ entries }) => html`<ul class="legend">${entries.map(([style, name]) => html`
    <li><svg class="swatch" viewBox="0 0 24 11" aria-hidden="true">${style}</svg>${name}</li>`)}</ul>`;
  I.box = (color) => htmPreact.html`<rect width="24" height="11" fill=${`var(--${color})`}/>`;
})(window.Isthmus);
