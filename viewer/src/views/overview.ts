// Thumbnails of all heads, which can be sorted and filtered by label.
import { signedBackground } from "../color";
import { labelsOf } from "../data";
import { Choices, element, press, section, toggle } from "../dom";
import type { Maps } from "../maps";
import { signedText } from "../numbers";
import type { Actions, Frame, View } from "../state";
import { entropyOf, thumbnail, thumbnailSize } from "../thumbnails";

type Order = "position" | "focus" | "contribution" | "label";

const MANY_HEADS = 150; // number of heads above which thumbnails are smaller

interface Head {
  layer: number;
  head: number;
  labels: string[];
  button: HTMLButtonElement;
  canvas: HTMLCanvasElement;
  strip: HTMLElement;
  entropy: number;
}

export class Overview implements View {
  readonly element: HTMLElement;
  private readonly heads: Head[] = [];
  private readonly grid: HTMLElement;
  private readonly orders: Choices<Order>;
  private readonly filters: Map<string, HTMLButtonElement>;
  private readonly selectedLabels = new Set<string>();
  private order: Order = "position";
  private frame: Frame | null = null;
  private painted = "";
  private paintId = 0;

  constructor(
    private readonly actions: Actions,
    private readonly maps: Maps,
  ) {
    const { page } = actions;
    const [{ layers, heads }] = page.texts;
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) this.heads.push(this.makeHead(layer, head));
    }
    this.grid = element("div", { class: "heads", role: "toolbar", "aria-label": "All heads" });
    this.grid.addEventListener("keydown", (event) => this.onKey(event));
    const orders: [Order, string][] = [["position", "layer"], ["focus", "sharpest"]];
    if (page.texts.some((text) => text.headContributions)) orders.push(["contribution", "contribution"]);
    if (page.labels.length) orders.push(["label", "label"]);
    this.orders = new Choices("Order of the heads", orders, (order) => {
      this.order = order;
      this.arrange();
    });
    const names = [...new Set(page.labels.flatMap((entry) => entry.labels))].sort();
    this.filters = new Map(names.map((name) => [name, toggle(name, false, () => this.filter(name))]));
    const filterBar = element("div", { class: "choices loose", role: "group", "aria-label": "Filter heads by label" }, ...this.filters.values());
    this.element = section(
      "overview",
      "All heads",
      `${layers} layers with ${heads} heads each. Each row is a layer, each thumbnail the attention map of a head.`,
      element("div", { class: "bar" }, element("span", { class: "label" }, "Order by"), this.orders.element, names.length ? filterBar : null),
      this.grid,
    );
    this.arrange();
  }

  draw(frame: Frame): void {
    const before = this.frame;
    this.frame = frame;
    if (!before || before.state.layer !== frame.state.layer || before.state.head !== frame.state.head) {
      for (const head of this.heads) {
        press(head.button, head.layer === frame.state.layer && head.head === frame.state.head);
      }
      this.rove();
    }
    const key = `${frame.state.text} ${frame.state.scale} ${frame.dark}`;
    if (key !== this.painted) {
      this.painted = key;
      this.drawContributions(frame);
      void this.paintAll(frame);
    }
  }

  private makeHead(layer: number, head: number): Head {
    const labels = labelsOf(this.actions.page, layer, head);
    const canvas = element("canvas", { width: 1, height: 1, "aria-hidden": "true" });
    const strip = element("i", { class: "strip", hidden: true });
    const name = `Layer ${layer}, head ${head}${labels.length ? `: ${labels.join(", ")}` : ""}`;
    const tag = element("span", { class: "tag", "aria-hidden": "true" }, labels.length ? "•" : "");
    const caption = element("span", { class: "caption", "aria-hidden": "true" }, `L${layer}H${head}`);
    const attributes = { type: "button", class: "head", "aria-label": name, "aria-pressed": "false", title: name, tabindex: -1 };
    const button = element("button", attributes, canvas, strip, tag, caption);
    button.addEventListener("click", () => this.actions.change({ layer, head }));
    return { layer, head, labels, button, canvas, strip, entropy: 0 };
  }

  /** Paint layer by layer, yielding to the event loop after each layer. */
  private async paintAll(frame: Frame): Promise<void> {
    const paintId = ++this.paintId;
    const size = frame.text.tokens.length;
    const side = thumbnailSize(size);
    for (let layer = 0; layer < frame.text.layers; layer++) {
      const bytes = await this.maps.layer(frame.state.text, layer);
      await new Promise((resume) => setTimeout(resume, 0));
      if (paintId !== this.paintId) return;
      for (const head of this.heads) {
        if (head.layer !== layer) continue;
        const map = bytes.subarray(head.head * size * size, (head.head + 1) * size * size);
        head.canvas.width = head.canvas.height = side;
        const context = head.canvas.getContext("2d") as CanvasRenderingContext2D;
        const image = context.createImageData(side, side);
        const pixels = new Uint32Array(image.data.buffer);
        thumbnail(map, size).forEach((byte, index) => (pixels[index] = frame.table[byte]));
        context.putImageData(image, 0, 0);
        head.entropy = entropyOf(map) / size;
      }
    }
    this.grid.dataset.painted = String(frame.text.layers);
    if (this.order === "focus") this.arrange();
  }

  private drawContributions(frame: Frame): void {
    const values = frame.text.headContributions;
    const extent = Math.max(...(values ?? [[0]]).flat().map(Math.abs)) || 1;
    for (const head of this.heads) {
      head.strip.hidden = !values;
      if (!values) continue;
      const value = values[head.layer][head.head];
      head.strip.style.backgroundColor = signedBackground(value / extent);
      const name = `Layer ${head.layer}, head ${head.head}: contributes ${signedText(value)}`;
      head.button.title = [name, ...head.labels].join(", ");
      head.button.setAttribute("aria-label", head.button.title);
    }
  }

  private arrange(): void {
    const byPosition = this.order === "position";
    const [{ heads, headContributions }] = this.frame ? [this.frame.text] : this.actions.page.texts;
    const contribution = (head: Head): number => Math.abs(headContributions?.[head.layer][head.head] ?? 0);
    const keys: Record<Order, (head: Head) => number | string> = {
      position: () => 0,
      focus: (head) => head.entropy,
      contribution: (head) => -contribution(head),
      label: (head) => head.labels[0] ?? "\uffff",
    };
    const key = keys[this.order];
    const sorted = [...this.heads].sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
    this.grid.classList.toggle("sorted", !byPosition);
    this.grid.style.setProperty("--heads", String(heads));
    this.grid.classList.toggle("many", this.heads.length > MANY_HEADS);
    const children: Node[] = [];
    if (byPosition) {
      children.push(element("span", { class: "corner" }));
      for (let head = 0; head < heads; head++) children.push(element("span", { class: "axis" }, String(head)));
    }
    for (const head of sorted) {
      if (byPosition && head.head === 0) children.push(element("span", { class: "axis layer" }, String(head.layer)));
      children.push(head.button);
    }
    this.grid.replaceChildren(...children);
    this.orders.show(this.order);
    this.rove();
  }

  private filter(name: string): void {
    if (!this.selectedLabels.delete(name)) this.selectedLabels.add(name);
    for (const [label, button] of this.filters) press(button, this.selectedLabels.has(label));
    for (const head of this.heads) {
      const matches = !this.selectedLabels.size || head.labels.some((label) => this.selectedLabels.has(label));
      head.button.classList.toggle("faded", !matches);
    }
  }

  private buttonsInOrder(): HTMLButtonElement[] {
    return [...this.grid.querySelectorAll<HTMLButtonElement>(".head")];
  }

  /** Update the roving tab stop: the selected head, or else the first. */
  private rove(): void {
    const buttons = this.buttonsInOrder();
    const chosen = buttons.find((button) => button.getAttribute("aria-pressed") === "true") ?? buttons[0];
    for (const button of buttons) button.tabIndex = button === chosen ? 0 : -1;
  }

  private onKey(event: KeyboardEvent): void {
    const buttons = this.buttonsInOrder();
    const index = buttons.indexOf(document.activeElement as HTMLButtonElement);
    const columns = this.order === "position" ? this.actions.page.texts[0].heads : Math.max(1, columnsOf(buttons));
    const steps: Record<string, number> = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: columns,
      ArrowUp: -columns,
      PageDown: columns,
      PageUp: -columns,
      Home: -index,
      End: buttons.length - 1 - index,
    };
    if (index < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const next = buttons[index + steps[event.key]];
    if (!next) return;
    next.focus();
    next.click();
  }
}

function columnsOf(buttons: HTMLElement[]): number {
  return buttons.filter((button) => button.offsetTop === buttons[0].offsetTop).length;
}
