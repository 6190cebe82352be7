// The controls of the steps Scaling, Mask and Softmax, and the list of changed options.
import { Choices, element, newId, toggle, press } from "../dom";
import { counted, plainText } from "../numbers";
import { MODEL_OPTIONS, type Mask } from "./attention";
import { isUnchanged, layerData, MAX_TEMPERATURE, MIN_TEMPERATURE, type State } from "./state";
import type { WalkthroughData } from "./data";

export class OptionControls {
  readonly element: HTMLElement;
  private readonly scaling: HTMLButtonElement;
  private readonly masks: Choices<Mask>;
  private readonly padding = element("input", { type: "number", id: newId("padding"), min: 1 });
  private readonly slider = element("input", { type: "range", id: newId("temperature"), step: 0.05 });
  private readonly temperature = element("output", { for: this.slider.id });
  private readonly groups: Record<string, HTMLElement>;
  private readonly paddingField: HTMLElement;
  private readonly changed = element("p", { class: "changed" });

  constructor(
    private readonly data: WalkthroughData,
    change: (part: Partial<State>) => void,
    state: () => State,
    onReset: () => void, // called when the button is about to disappear, to move the focus
  ) {
    this.scaling = toggle("", true, () => change({ scaled: !state().scaled }));
    const masks: [Mask, string][] = [["none", "None"], ["causal", "Causal"], ["padding", "Padding"]];
    this.masks = new Choices("Mask", masks, (mask) => change({ mask }));
    this.padding.max = String(Math.max(1, data.tokens.length - 1));
    this.padding.addEventListener("input", () => {
      const count = Number(this.padding.value);
      if (Number.isInteger(count) && count >= 1 && count <= Number(this.padding.max)) change({ padding: count });
    });
    this.paddingField = element("span", { class: "slot" }, element("label", { for: this.padding.id }, "Last tokens to mask"), this.padding);
    [this.slider.min, this.slider.max] = [MIN_TEMPERATURE, MAX_TEMPERATURE].map((value) => String(Math.log10(value)));
    this.slider.addEventListener("input", () => change({ temperature: Number((10 ** Number(this.slider.value)).toPrecision(2)) }));
    this.groups = {
      Scaling: element("div", { class: "bar" }, this.scaling),
      Mask: element("div", { class: "bar" }, element("span", { class: "label" }, "Mask"), this.masks.element, this.paddingField),
      Softmax: element("div", { class: "bar" }, element("label", { for: this.slider.id }, "Temperature τ"), this.slider, this.temperature),
    };
    const reset = element("button", { type: "button", class: "toggle" }, "Reset");
    reset.addEventListener("click", () => {
      change({ ...MODEL_OPTIONS });
      onReset();
    });
    this.element = element("div", { class: "options" }, ...Object.values(this.groups), element("div", { class: "bar reset" }, this.changed, reset));
  }

  /** Show the controls of a step, and the options that differ from the model. */
  draw(state: State, step: string): void {
    for (const [name, group] of Object.entries(this.groups)) group.hidden = name !== step;
    const isUnscaledModel = layerData(this.data, state.layer).scale === 1;
    this.scaling.textContent = isUnscaledModel ? "Scale by 1/√d_k" : "Scale the scores";
    press(this.scaling, state.scaled !== isUnscaledModel);
    this.masks.show(state.mask);
    this.paddingField.hidden = state.mask !== "padding";
    if (document.activeElement !== this.padding) this.padding.value = String(state.padding);
    this.slider.value = String(Math.log10(state.temperature));
    this.temperature.textContent = this.slider.ariaValueText = plainText(state.temperature, state.temperature < 1 ? 2 : 1);
    const parts = [
      state.scaled ? "" : isUnscaledModel ? "scaled by 1/√d_k" : "not scaled",
      state.mask === "none" ? "" : state.mask === "causal" ? "causal mask" : `last ${counted(state.padding, "token")} masked`,
      state.temperature === 1 ? "" : `temperature ${this.temperature.textContent}`,
    ];
    this.changed.textContent = `Different from the model: ${parts.filter(Boolean).join(", ")}.`;
    (this.changed.parentElement as HTMLElement).hidden = isUnchanged(state);
  }
}
