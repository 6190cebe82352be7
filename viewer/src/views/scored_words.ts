// Words colored by their contributions, with a line below that shows the number of the word under the pointer.
import { Chips } from "../chips";
import { signedBackground } from "../color";
import { element, short } from "../dom";
import { signedText } from "../numbers";
import { summed, type Unit } from "../units";

export class ScoredWords {
  readonly element: HTMLElement;
  private readonly chips: Chips;
  private units: Unit[] = [];
  private titles: string[] = [];
  private hover: number | null = null;
  private chosen: number | null = null;

  /** `readOut` shows the selected word, and `usual` if there is none. */
  constructor(
    label: string,
    private readonly readOut: HTMLElement,
    private readonly usual: string,
    private readonly pointed: (index: number | null) => void = () => undefined,
  ) {
    this.chips = new Chips(label, {
      hover: (index) => this.point(index, this.chosen),
      choose: (index) => this.point(null, index),
    });
    this.element = element("div", { class: "scored" }, this.chips.element);
    readOut.textContent = usual;
  }

  /** Color the units by the sums of their values. `detail` continues the number of a unit. */
  draw(units: Unit[], values: number[], extent: number, detail: (index: number) => string = () => ""): void {
    this.units = units;
    this.chips.element.hidden = units.length === 0; // a text without tokens
    if (units.length === 0) return;
    const scores = summed(values, units);
    this.titles = scores.map((score, index) => `${signedText(score)}${detail(index)}`);
    this.chips.show(units);
    this.chips.paint(scores.map((score) => signedBackground(score / (extent || 1))), this.titles);
    this.chips.mark(null);
    this.point(null, null);
  }

  private point(hover: number | null, chosen: number | null): void {
    this.hover = hover;
    this.chosen = chosen;
    const index = this.hover ?? this.chosen;
    if (index === null) this.readOut.textContent = this.usual;
    else this.readOut.replaceChildren(element("b", {}, short(this.units[index].shown)), ` ${this.titles[index]}`);
    this.pointed(index);
  }
}

/** Return the largest absolute value of the units of all lists. */
export function extentOf(lists: { units: Unit[]; values: number[] }[]): number {
  return Math.max(0, ...lists.flatMap(({ units, values }) => summed(values, units).map(Math.abs)));
}
