// The page: holds the state, decodes the layers it needs, and redraws the current step.
import { tableOf, weightBackground } from "../color";
import { Chips } from "../chips";
import { Stepper } from "../controls";
import { element, newId } from "../dom";
import { counted, percentText } from "../numbers";
import { unitsOf, type Unit } from "../units";
import { disagreement, rowOf, type Layer } from "./attention";
import { decodeLayer, type WalkthroughData } from "./data";
import { keyboard } from "./keys";
import { OptionControls } from "./options";
import { fromFragment, layerData, toFragment, type State } from "./state";
import { STEPS, type Context } from "./steps";

const DELAY_MS = 300; // for announcements, and because browsers limit how often a page may change its URL

export class WalkthroughApp {
  private state: State;
  private readonly layers = new Map<number, Layer>();
  private readonly units: Unit[];
  private readonly chips: Chips;
  private readonly layerStepper: Stepper;
  private readonly headStepper: Stepper;
  private readonly options: OptionControls;
  private readonly status = element("p", { class: "visually-hidden", role: "status" });
  private readonly heading = element("h2", { id: newId("step"), tabindex: -1 });
  private readonly content = element("div", { class: "content" });
  private readonly buttons: HTMLButtonElement[];
  private readonly back = element("button", { type: "button", class: "toggle" }, "‹ Back");
  private readonly next = element("button", { type: "button", class: "toggle" }, "Next ›");
  private readonly count = element("span", { class: "label" });
  private timer = 0;

  constructor(
    private readonly root: HTMLElement,
    private readonly data: WalkthroughData,
    private readonly base64: (layer: number) => string,
  ) {
    this.state = fromFragment(window.location.hash, data, STEPS.length);
    this.units = unitsOf(data.tokens, "tokens");
    this.chips = new Chips("Tokens: select the one to follow", { hover: () => undefined, choose: (token) => this.change({ token }) });
    const numbers = (values: number[]): [number, string][] => values.map((value) => [value, String(value)]);
    const heads = Math.max(...data.layers.map((layer) => layer.heads));
    this.layerStepper = new Stepper("Layer", numbers(data.layers.map((layer) => layer.index)), (layer) => this.change({ layer }));
    this.headStepper = new Stepper("Head", numbers(Array.from({ length: heads }, (_, head) => head)), (head) => this.change({ head }));
    this.options = new OptionControls(data, (part) => this.change(part), () => this.state, () => this.heading.focus());
    this.buttons = STEPS.map(({ name }, index) => {
      const button = element("button", { type: "button", class: "toggle" }, `${index + 1} ${name}`);
      button.addEventListener("click", () => this.change({ step: index }));
      return button;
    });
    this.back.addEventListener("click", () => this.move("step", -1));
    this.next.addEventListener("click", () => this.move("step", 1));
    this.build();
    window.addEventListener("hashchange", () => this.replace(fromFragment(window.location.hash, data, STEPS.length)));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  private build(): void {
    const { data } = this;
    const { dialog, button } = keyboard({
      step: (by) => this.move("step", by),
      token: (by) => this.move("token", by),
      head: (by) => this.move("head", by),
      layer: (by) => this.moveLayer(by),
    });
    const facts = [data.model, counted(data.tokens.length, "token"), counted(data.layers.length, "layer")].join(" · ");
    const omitted = data.omitted.map(({ layer, mechanism }) => `${layer} (${mechanism})`).join(", ");
    const note = `Not shown, because their attention is not a softmax of q·k of all pairs of tokens: layer ${omitted}.`;
    this.root.classList.add("attnlens", "walkthrough");
    this.root.replaceChildren(
      element(
        "header",
        { class: "top" },
        element("div", {}, element("h1", {}, "Attention step by step"), element("p", { class: "facts" }, facts)),
        button,
      ),
      omitted ? element("p", { class: "about" }, note) : "",
      this.chips.element,
      element("div", { class: "bar selection" }, this.layerStepper.element, this.headStepper.element),
      element("nav", { class: "choices loose", "aria-label": "Steps" }, ...this.buttons),
      element("section", { class: "part step-part", "aria-labelledby": this.heading.id }, this.heading, this.options.element, this.content),
      element("nav", { class: "turn", "aria-label": "Previous and next step" }, this.back, this.count, this.next),
      dialog,
      this.status,
    );
  }

  private change(part: Partial<State>): void {
    this.replace({ ...this.state, ...part });
  }

  private replace(state: State): void {
    const isOtherStep = state.step !== this.state.step;
    this.state = { ...state, head: Math.min(state.head, layerData(this.data, state.layer).heads - 1) };
    this.draw();
    if (isOtherStep && this.heading.getBoundingClientRect().top < 0) this.heading.scrollIntoView();
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      window.history.replaceState(null, "", toFragment(this.state));
      this.announce();
    }, DELAY_MS);
  }

  private move(name: "step" | "token" | "head", by: number): void {
    const { heads } = layerData(this.data, this.state.layer);
    const count = { step: STEPS.length, token: this.data.tokens.length, head: heads }[name];
    const value = this.state[name] + by;
    if (value >= 0 && value < count) this.change({ [name]: value });
  }

  private moveLayer(by: number): void {
    const index = this.data.layers.findIndex((layer) => layer.index === this.state.layer) + by;
    if (index in this.data.layers) this.change({ layer: this.data.layers[index].index });
  }

  private context(): Context {
    const { data, state } = this;
    const described = layerData(data, state.layer);
    const tokens = data.tokens.length;
    const layer = this.layers.get(state.layer) ?? decodeLayer(described, tokens, this.base64(state.layer));
    this.layers.set(state.layer, layer);
    const table = tableOf("viridis", window.matchMedia("(prefers-color-scheme: dark)").matches);
    const row = rowOf(layer, tokens, state.head, state.token, state);
    const agreement = (): number => disagreement(layer, tokens);
    return { data, state, described, layer, row, agreement, table, choose: (head) => this.change({ head }) };
  }

  draw(): void {
    const context = this.context();
    const { state } = this;
    const step = STEPS[state.step];
    this.chips.show(this.units);
    const weights = context.row.weights;
    this.chips.paint(weights.map(weightBackground), weights.map((weight) => `weight ${percentText(weight)}`));
    this.chips.mark(state.token);
    this.layerStepper.show(state.layer);
    this.headStepper.show(state.head);
    this.options.draw(state, step.name);
    this.buttons.forEach((button, index) => {
      if (index === state.step) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    });
    if (this.buttons.includes(document.activeElement as HTMLButtonElement)) this.buttons[state.step].focus();
    this.back.disabled = state.step === 0;
    this.next.disabled = state.step === STEPS.length - 1;
    this.count.textContent = `Step ${state.step + 1} of ${STEPS.length}`;
    this.heading.textContent = `${state.step + 1}. ${step.title}`;
    this.show(
      element("pre", { class: "formula" }, step.formula(context)),
      ...step.text(context).map((text) => element("p", {}, text)),
      element("p", { class: "fact", dir: "auto" }, step.fact(context)),
      ...step.picture(context),
    );
    this.root.dataset.drawn = `${state.step + 1} ${state.token} ${state.layer} ${state.head}`;
    if (!this.root.dataset.ready) performance.mark("attnlens-first");
    this.root.dataset.ready = "true";
  }

  /** Replace the content of the step, keeping the focus and the open lists of numbers. */
  private show(...content: Element[]): void {
    const key = (document.activeElement as HTMLElement | null)?.dataset.key;
    const isOpen = Array.from(this.content.querySelectorAll("details"), (details) => details.open);
    this.content.replaceChildren(...content);
    this.content.querySelectorAll("details").forEach((details, index) => (details.open = isOpen[index] ?? false));
    if (key) this.content.querySelector<HTMLElement>(`[data-key="${key}"]`)?.focus();
  }

  private announce(): void {
    const { step, layer, head } = this.state;
    const fact = this.content.querySelector(".fact")?.textContent ?? "";
    this.status.textContent = `Step ${step + 1}, ${STEPS[step].name}. Layer ${layer}, head ${head}. ${fact}`;
  }
}
