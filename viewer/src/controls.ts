// Controls shared by several views: layer, head, words or tokens, special tokens and color scale.
import type { Scale } from "./color";
import { Choices, element, newId, press, toggle } from "./dom";
import type { Actions, Frame } from "./state";
import type { Level } from "./units";

/** A select element with buttons for the previous and next option. */
export class Stepper {
  readonly element: HTMLElement;
  private readonly select = element("select");

  constructor(label: string, options: [number, string][], onChoose: (value: number) => void) {
    for (const [value, text] of options) this.select.append(element("option", { value }, text));
    this.select.setAttribute("aria-label", label);
    this.select.addEventListener("change", () => onChoose(Number(this.select.value)));
    const step = (by: number): void => {
      const index = (this.select.selectedIndex + by + options.length) % options.length;
      onChoose(options[index][0]);
    };
    const makeButton = (text: string, name: string, by: number): HTMLButtonElement => {
      const button = element("button", { type: "button", class: "step", "aria-label": name }, text);
      button.addEventListener("click", () => step(by));
      return button;
    };
    this.element = element(
      "div",
      { class: "stepper" },
      element("span", { class: "label" }, label),
      makeButton("‹", `Previous ${label.toLowerCase()}`, -1),
      this.select,
      makeButton("›", `Next ${label.toLowerCase()}`, 1),
    );
  }

  show(value: number): void {
    this.select.value = String(value);
  }
}

/** A select element below its label. */
export class Selector {
  readonly element: HTMLElement;
  private readonly select: HTMLSelectElement;

  constructor(label: string, options: [number, string][], onChoose: (value: number) => void) {
    const id = newId("select");
    this.select = element("select", { id }, ...options.map(([value, text]) => element("option", { value }, text)));
    this.select.addEventListener("change", () => onChoose(Number(this.select.value)));
    this.element = element("div", { class: "selector" }, element("label", { for: id, class: "label" }, label), this.select);
  }

  show(value: number): void {
    this.select.value = String(value);
  }
}

const MEAN = -1;

/** Controls in the page header that affect every view: words or tokens, and special tokens. */
export class UnitControls {
  readonly element: HTMLElement;
  private readonly levels: Choices<Level>;
  private readonly specials: HTMLButtonElement;

  constructor(actions: Actions) {
    const levels: [Level, string][] = [["words", "Words"], ["tokens", "Tokens"]];
    this.levels = new Choices("Words or tokens", levels, (level) => actions.change({ level, column: null, hover: null }));
    this.specials = toggle("Special tokens", true, () =>
      actions.change({ specials: !actions.state().specials, column: null, hover: null }),
    );
    this.element = element("div", { class: "bar" }, this.levels.element, this.specials);
  }

  draw(frame: Frame): void {
    this.levels.show(frame.state.level);
    press(this.specials, frame.state.specials);
  }
}

/** Controls for the layer, head and color scale. */
export class HeadControls {
  readonly element: HTMLElement;
  private readonly layer: Stepper;
  private readonly head: Stepper;
  private readonly scales: Choices<Scale>;

  constructor(actions: Actions) {
    const [{ layers, heads }] = actions.page.texts;
    const numbers = (count: number): [number, string][] => Array.from({ length: count }, (_, index) => [index, String(index)]);
    this.layer = new Stepper("Layer", numbers(layers), (layer) => actions.change({ layer }));
    this.head = new Stepper("Head", [[MEAN, "mean"], ...numbers(heads)], (head) =>
      actions.change({ head: head === MEAN ? null : head }),
    );
    const scales: [Scale, string][] = [["viridis", "viridis"], ["cividis", "cividis"], ["ink", "blue"]];
    this.scales = new Choices("Color scale", scales, (scale) => actions.change({ scale }));
    this.element = element("div", { class: "bar" }, this.layer.element, this.head.element, this.scales.element);
  }

  draw(frame: Frame): void {
    this.layer.show(frame.state.layer);
    this.head.show(frame.state.head ?? MEAN);
    this.scales.show(frame.state.scale);
  }
}
