// A bar chart of the largest scores, followed by the remaining scores, the baseline and the sum.
import type { ScoresData } from "./data";
import { element, newId, short } from "./dom";
import { counted, plainText, signedText } from "./numbers";
import { summed, type Unit } from "./units";

const SHOWN = 8;

export class Bars {
  readonly element: HTMLElement;
  private readonly body = element("tbody");
  private readonly caption: HTMLElement;

  constructor(title: string) {
    this.caption = element("caption", { id: newId("bars") }, title);
    this.element = element("table", { class: "bars" }, this.caption, this.body);
  }

  draw(scores: ScoresData, units: Unit[], highlighted: number | null): void {
    const values = summed(scores.values, units);
    const order = values.map((_, index) => index).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b);
    const shown = order.length === SHOWN + 1 ? order.length : SHOWN; // a row "1 other" would need the same space
    const top = order.slice(0, shown).sort((a, b) => a - b);
    const extent = Math.max(...values.map(Math.abs)) || 1; // without the baseline: a large baseline must not shrink the bars
    const rows = top.map((index) => row(short(units[index].shown), values[index], extent, index === highlighted));
    const rest = scores.values.reduce((sum, value) => sum + value, 0) - top.reduce((sum, index) => sum + values[index], 0);
    const others = order.length - top.length;
    if (others || Math.abs(rest) > 5e-4) rows.push(row(others ? counted(others, "other") : "special tokens", rest, extent, false, "muted"));
    if (scores.baseline !== null) rows.push(row("baseline", scores.baseline, null, false, "muted"));
    if (scores.sum !== null) {
      rows.push(
        element("tr", { class: "total" }, element("th", { scope: "row" }, "sum"), element("td", { class: "number" }, plainText(scores.sum)), element("td", {}, scores.target)),
      );
    }
    this.body.replaceChildren(...rows);
  }
}

// Draws no bar if `extent` is null.
function row(name: string, value: number, extent: number | null, highlighted: boolean, kind = ""): HTMLElement {
  const gauge = element("td", { class: "gauge" });
  if (extent !== null) {
    const bar = element("i", { class: value < 0 ? "minus" : "plus" });
    bar.style.width = `${Math.min(100, (100 * Math.abs(value)) / extent)}%`;
    gauge.append(bar);
  }
  return element(
    "tr",
    { class: `${kind}${highlighted ? " highlighted" : ""}` },
    element("th", { scope: "row", dir: "auto" }, name),
    element("td", { class: "number" }, signedText(value)),
    gauge,
  );
}
