/** Runs: their curves while they train, their samples, and the reports that lie beside them. */
import { get } from "../api.js";
import { addressOf, update } from "../address.js";
import { useAnswer } from "../asking.js";
import { Chart } from "../parts/chart.js";
import { Downloads } from "../parts/downloads.js";
import { Problem } from "../parts/fields.js";
import { figure, html, useEffect, useState } from "../ui.js";

const PAUSE = 2000;
const POINTS = 800;
const ALL = "all texts";

/** The charts of a run: title, the columns' beginnings, and whether it stands above the fold. */
const CHARTS = [
  ["Loss", ["loss"], true],
  ["Bits per byte of validation text", ["bits_per_byte"], true],
  ["Entropy of routers (1: all choices alike)", ["entropy"], true],
  ["Rarest choice (1: taken as others are, 0: never)", ["lowest"], true],
  ["Routing losses", ["routing_loss"], false],
  ["Perplexity of validation text", ["perplexity"], false],
  ["Learning rate", ["learning_rate"], false],
  ["Gradient norm", ["gradient_norm"], false],
  ["Tokens per second", ["tokens_per_second"], false],
];

export function Runs({ state }) {
  const [round, again] = useState(0);
  const { answer, error } = useAnswer((signal) => get("/braid/runs", signal), [round + 1]);
  const [told, tell] = useState(null);
  useEffect(() => {
    if (answer) tell(answer);
    const timer = setTimeout(() => again((n) => n + 1), 3 * PAUSE);
    return () => clearTimeout(timer);
  }, [answer, error]);
  if (!told) return html`<${Problem} error=${error} />${!error && html`<p class="soft" role="status">Looking for runs …</p>`}`;
  const run = told.runs.find((one) => one.id === state.run) ?? (told.runs.length === 1 ? told.runs[0] : null);
  return html`<${Problem} error=${error} />
    ${!told.runs.length && !told.reports.length && html`<p class="soft">No run is served. <code>braid serve runs/</code> shows all runs and reports of a folder, and <code>braid serve RUN</code> one while it trains.</p>`}
    ${told.runs.length > 0 && html`<${RunTable} runs=${told.runs} chosen=${run} />`}
    ${run && html`<${Run} key=${run.id} run=${run} />`}
    ${told.reports.length > 0 && html`<section aria-label="Reports"><h2>Reports</h2><ul class="cards">${told.reports.map(
      (report) => html`<li key=${report.id}><a href=${local(report.url)}><b>${report.title}</b></a>${report.about && html`<p>${report.about}</p>`}<small>${report.name}</small></li>`,
    )}</ul></section>`}`;
}

/** How long ago something was, in words. @param {number} seconds since 1970 */
function ago(seconds) {
  const past = Math.max(0, Date.now() / 1000 - seconds);
  const [unit, size] = [["day", 86400], ["hour", 3600], ["minute", 60]].find(([, size]) => past >= size) ?? [];
  return !unit ? "just now" : new Intl.RelativeTimeFormat("en").format(-Math.floor(past / size), unit);
}

/** An address on this server, whatever a report's says. */
function local(url) {
  return typeof url === "string" && /^\/(?![/\\])/.test(url) ? url : "#";
}

function RunTable({ runs, chosen }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of runs"><table class="runs">
    <caption>${chosen ? "The curves of the marked run are below." : "Choose a run for its curves and samples."} Bits per byte are of validation text: lower is better.</caption>
    <thead><tr><th scope="col">run</th><th scope="col">state</th><th scope="col" class="number">step</th><th scope="col" class="number">loss</th><th scope="col" class="number">bits per byte</th><th scope="col" class="number late">recorded</th></tr></thead>
    <tbody>${runs.map((run) => html`<tr key=${run.id} class=${run === chosen ? "chosen" : ""}><th scope="row"><a href=${addressOf({ view: "runs", run: run.id })} aria-current=${run === chosen ? "true" : undefined}>${run.name.split("/").map((part, at) => html`${at > 0 && html`/<wbr />`}${part}`)}</a></th>
      <td><span class=${`state ${/^[a-z]+$/.test(run.state) ? run.state : ""}`}>${run.state}</span></td><td class="number">${figure(run.step)}</td><td class="number">${figure(run.loss)}</td><td class="number">${figure(run.bits_per_byte)}</td><td class="number late">${ago(run.changed)}</td></tr>`)}</tbody></table></div>`;
}

/** All records of a run, and those that come while it trains. */
function useMetrics(id) {
  const [seen, see] = useState({ columns: [], rows: [], done: false, error: null });
  useEffect(() => {
    const stopping = new AbortController();
    let cursor = null;
    let timer = null;
    const ask = async () => {
      let wait = PAUSE;
      try {
        const told = await get(`/braid/runs/${encodeURIComponent(id)}/metrics${cursor === null ? "" : `?after=${encodeURIComponent(cursor)}`}`, stopping.signal);
        see((old) => ({ columns: told.columns, rows: told.reset ? told.rows : [...old.rows, ...told.rows], done: told.done, error: null }));
        cursor = told.next ?? cursor;
        if (told.more) wait = 0;
        else if (told.done) return;
      } catch (error) {
        if (stopping.signal.aborted) return;
        see((old) => ({ ...old, error: error.message }));
      }
      timer = setTimeout(ask, wait);
    };
    ask();
    return () => {
      stopping.abort();
      clearTimeout(timer);
    };
  }, [id]);
  return seen;
}

function Run({ run }) {
  const { columns, rows, done, error } = useMetrics(run.id);
  const { answer } = useAnswer((signal) => get(`/braid/runs/${encodeURIComponent(run.id)}/samples`, signal), [run.id, run.step ?? 0]);
  const charts = CHARTS.map(([title, begins, first]) => ({ title, first, series: seriesOf(columns, rows, begins) })).filter(({ series }) => Object.keys(series).length);
  const drawn = (some) => html`<div class="charts">${some.map(({ title, series }) => html`<${Chart} key=${title} chart=${{ kind: "lines", name: `${run.name} ${title}`, title, series, x_label: "step", y_label: "" }} />`)}</div>`;
  return html`<section aria-label=${`Run ${run.name}`}>
    <h2>${run.name}</h2>
    <p class="soft" role="status">${rows.length ? `${rows.length.toLocaleString("en")} records, to step ${figure(rows.at(-1)[0])}. ${done ? "It has ended." : "More is shown as it comes."}` : "Nothing is recorded yet."}</p>
    ${run.model && html`<p><a href=${addressOf({ view: "write", model: run.model })}>Write with its model</a></p>`}
    <${Problem} error=${error} />
    ${drawn(charts.filter(({ first }) => first))}
    ${charts.some(({ first }) => !first) && html`<details><summary>More curves</summary>${drawn(charts.filter(({ first }) => !first))}</details>`}
    ${answer?.samples?.length > 0 && html`<h3>Samples</h3><ol class="samples">${[...answer.samples].reverse().map(
      (sample, index) => html`<li key=${index}><small>step ${figure(sample.step)}</small><blockquote><b>${sample.prompt}</b>${sample.text}</blockquote></li>`,
    )}</ol>`}
    ${rows.length > 0 && html`<${Downloads} name=${`${run.name} metrics`} table=${() => [columns, ...rows]} data=${() => ({ run: run.name, columns, rows })} />`}
  </section>`;
}

/** Lines of the columns `NAME`, unless it is that of one text, and `NAME/...`, thinned evenly where there are more points than a chart can show. */
function seriesOf(columns, rows, begins) {
  const made = {};
  const isPart = (column) => column.includes("/");
  for (const column of [...columns.filter((one) => !isPart(one)), ...columns.filter(isPart)]) {
    const index = columns.indexOf(column);
    const [head, ...rest] = column.split("/");
    if (!begins.includes(head)) continue;
    const known = rows.filter((row) => typeof row[index] === "number");
    if (!known.length) continue;
    const stride = Math.ceil(known.length / POINTS);
    const kept = known.filter((_, at) => at % stride === 0 || at === known.length - 1);
    made[seriesName(head, rest.join("/"))] = [kept.map((row) => row[0]), kept.map((row) => row[index])];
  }
  if (Object.keys(made).length === 2) delete made[ALL];
  return made;
}

/** Measures of validation have a value for each text and one for all; the loss alone is that of training. */
function seriesName(measure, part) {
  if (measure === "loss") return part ? `validation, ${part}` : "training";
  return part || (measure === "bits_per_byte" || measure === "perplexity" ? ALL : measure.replaceAll("_", " "));
}
