// Charts of the steps. Each is an element with a text alternative; colors follow the style sheet.
import { css, type Table } from "../color";
import { element } from "../dom";

type Attributes = Record<string, string | number>;

function svg(name: string, attributes: Attributes, ...children: Node[]): SVGElement {
  const created = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, String(value));
  created.append(...children);
  return created;
}

function image(kind: string, label: string, width: number, height: number, ...children: Node[]): SVGElement {
  return svg("svg", { class: kind, role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}` }, ...children);
}

export interface Item {
  name: string;
  text: string; // the numbers of the item
  bar: number; // signed length of the bar, as a share of the axis
  note?: string; // additional number in muted color
}

/** Create a list with one bar for each token, in columns if there is space. Negative bars point left. */
export function tokenList(label: string, items: Item[], highlighted: number): HTMLElement {
  const zero = Math.max(0, ...items.map(({ bar }) => -bar));
  const rows = items.map(({ name, text, bar, note }, index) => {
    const gauge = element("i", { class: bar < 0 ? "minus" : "plus" });
    gauge.style.width = `${100 * Math.abs(bar)}%`;
    gauge.style.marginInlineStart = `${100 * (zero + Math.min(0, bar))}%`;
    const track = element("span", { class: zero > 0 ? "gauge signed" : "gauge" }, gauge);
    if (zero > 0) track.style.setProperty("--zero", `${100 * zero}%`);
    return element(
      "li",
      { class: index === highlighted ? "highlighted" : "" },
      element("span", { class: "axis" }, String(index)),
      element("span", { class: "name", dir: "auto" }, name),
      element("span", { class: "number" }, text),
      track,
      note === undefined ? null : element("span", { class: "note" }, note),
    );
  });
  const noted = items.some((item) => item.note !== undefined) ? " noted" : "";
  return element("ol", { class: `token-list${noted}`, start: 0, "aria-label": label }, ...rows);
}

/** Create a bar chart of a vector with positive bars above and negative bars below a line. */
export function vectorChart(label: string, values: ArrayLike<number>, marked?: [number, number]): SVGElement {
  const [width, height] = [640, 84];
  const [highest, lowest] = [Math.max(0, ...Array.from(values)), Math.min(0, ...Array.from(values))];
  const scale = height / (highest - lowest || 1);
  const zero = highest * scale;
  const step = width / values.length;
  const path = (sign: number): string =>
    Array.from(values, (value, index) =>
      value * sign > 0 ? `M${(index * step).toFixed(2)} ${zero.toFixed(2)}v${(-value * scale).toFixed(2)}h${(0.8 * step).toFixed(2)}V${zero.toFixed(2)}z` : "",
    ).join("");
  const parts = [svg("path", { class: "plus", d: path(1) }), svg("path", { class: "minus", d: path(-1) })];
  if (marked) parts.unshift(svg("rect", { class: "marked", x: marked[0] * step, y: 0, width: (marked[1] - marked[0]) * step, height }));
  parts.push(svg("path", { class: "zero", d: `M0 ${zero.toFixed(2)}H${width}` }));
  const chart = image("vector", label, width, height, ...parts);
  chart.setAttribute("preserveAspectRatio", "none");
  return chart;
}

/** Create the mask of all queries (rows) and keys (columns). */
export function maskChart(label: string, size: number, masked: (row: number, column: number) => boolean, chosen: number): SVGElement {
  const paths = ["", ""]; // open and masked cells, with a gap between them
  for (let row = 0; row < size; row++) {
    for (let column = 0; column < size; column++) paths[masked(row, column) ? 1 : 0] += `M${column + 0.06} ${row + 0.06}h.88v.88h-.88z`;
  }
  return image(
    "mask-chart",
    label,
    size,
    size,
    svg("path", { class: "open", d: paths[0] }),
    svg("path", { class: "closed", d: paths[1] }),
    svg("rect", { class: "chosen", x: 0, y: chosen, width: size, height: 1 }),
  );
}

/** Create the curve of exp(score / temperature), with one dot for each token, and mark the largest weight. */
export function softmaxCurve(label: string, scores: number[], weights: number[], temperature: number): SVGElement {
  const [width, height, left, bottom] = [400, 190, 40, 34];
  const finite = scores.filter((score) => score > -Infinity);
  const [lowest, highest] = [Math.min(...finite), Math.max(...finite)];
  const top = Math.max(...weights);
  const x = (score: number): number => left + ((width - left - 12) * (score - lowest)) / (highest - lowest || 1);
  const y = (weight: number): number => 14 + (height - bottom - 14) * (1 - weight / top);
  const curve = Array.from({ length: 101 }, (_, index) => {
    const score = lowest + ((highest - lowest) * index) / 100;
    return `${x(score).toFixed(1)} ${y(top * Math.exp((score - highest) / temperature)).toFixed(1)}`;
  });
  const dots = scores.flatMap((score, index) =>
    score > -Infinity ? [svg("circle", { class: "dot", cx: x(score).toFixed(1), cy: y(weights[index]).toFixed(1), r: 4 })] : [],
  );
  const text = (at: number, down: number, anchor: string, content: string): SVGElement =>
    svg("text", { x: at, y: down, "text-anchor": anchor }, document.createTextNode(content));
  return image(
    "curve",
    label,
    width,
    height,
    svg("path", { class: "zero", d: `M${left} 10V${y(0)}H${width - 8}` }),
    svg("path", { class: "line", d: `M${curve.join("L")}` }),
    ...dots,
    text(left - 5, 20, "end", top.toFixed(2)),
    text(left - 5, y(0) + 4, "end", "0"),
    text(left, height - 14, "start", lowest.toFixed(1).replace("-", "−")),
    text(width - 12, height - 14, "end", highest.toFixed(1).replace("-", "−")),
    text((left + width) / 2, height - 4, "middle", "score"),
  );
}

/** Create a strip with one cell for each weight. Colors follow the square root, as in attention maps. */
export function weightStrip(label: string, weights: number[], table: Table): SVGElement {
  const cells = weights.map((weight, index) =>
    svg("rect", { x: index, width: 1.02, height: 1, fill: css(table, Math.round(255 * Math.sqrt(Math.min(1, weight)))) }),
  );
  const strip = image("strip", label, weights.length, 1, ...cells);
  strip.setAttribute("preserveAspectRatio", "none");
  return strip;
}
