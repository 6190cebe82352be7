// Contrast: why the first text is closer to one text than to another.
import { Bars } from "../bars";
import { Chips } from "../chips";
import { signedBackground } from "../color";
import type { ContrastData } from "../data";
import { element, section, short } from "../dom";
import { plainText, signedText } from "../numbers";
import type { Actions, Frame, View } from "../state";
import { summed, visibleUnits, type Unit } from "../units";
import { aboutScores } from "./text_view";

export class ContrastView implements View {
  readonly element: HTMLElement;
  private readonly chips: Chips;
  private readonly bars = new Bars("Words that make the text more similar to the first (+) or the second (−)");
  private units: Unit[] = [];
  private hover: number | null = null;

  constructor(
    private readonly actions: Actions,
    private readonly contrast: ContrastData,
  ) {
    const point = (index: number | null): void => {
      this.hover = index;
      this.bars.draw(contrast.scores, this.units, index);
    };
    this.chips = new Chips("Tokens of the text, scored by contrast", { hover: point, choose: point });
    this.element = section(
      "contrast",
      "Closer to one text than to another",
      lead(contrast),
      this.chips.element,
      this.bars.element,
      element("p", { class: "about" }, aboutScores(contrast.scores)),
    );
  }

  draw(frame: Frame): void {
    const { level, specials } = frame.state;
    const units = visibleUnits(this.actions.page.texts[0].tokens, level, specials);
    if (units === this.units) return;
    this.units = units;
    const values = summed(this.contrast.scores.values, this.units);
    const extent = Math.max(...values.map(Math.abs)) || 1;
    this.chips.show(this.units);
    this.chips.paint(values.map((value) => signedBackground(value / extent)), values.map((value) => signedText(value)));
    this.bars.draw(this.contrast.scores, this.units, this.hover);
  }
}

function lead({ to, ratherThan, scores: { sum } }: ContrastData): HTMLElement {
  const texts = [quoted(to), " than to ", quoted(ratherThan), "."];
  if (sum === null) return element("span", {}, "Which words increase the cosine similarity to ", ...texts);
  const difference = `${plainText(Math.abs(sum))} ${sum < 0 ? "lower" : "higher"}`;
  return element("span", {}, "The cosine similarity is ", element("b", {}, difference), " to ", ...texts);
}

function quoted(text: string): HTMLElement {
  return element("q", { dir: "auto" }, short(text, 120));
}
