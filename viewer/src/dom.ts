// DOM helpers. Text is always inserted as text content, never parsed as HTML.

type Attributes = Record<string, string | number | boolean | null>;
type Child = Node | string | null;

export function element<K extends keyof HTMLElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const created = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) created.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null) created.append(child);
  return created;
}

let lastId = 0;

/** Return a unique element id. */
export function newId(name: string): string {
  lastId += 1;
  return `attnlens-${name}-${lastId}`;
}

/** Create a toggle button. */
export function toggle(text: string, pressed: boolean, onClick: () => void): HTMLButtonElement {
  const button = element("button", { type: "button", class: "toggle", "aria-pressed": String(pressed) }, text);
  button.addEventListener("click", onClick);
  return button;
}

export function press(button: HTMLElement, pressed: boolean): void {
  const value = String(pressed);
  if (button.getAttribute("aria-pressed") !== value) button.setAttribute("aria-pressed", value);
}

/** A group of toggle buttons of which one is pressed. */
export class Choices<T> {
  readonly element: HTMLElement;
  private readonly buttons: [T, HTMLButtonElement][];

  constructor(label: string, choices: [T, string][], onChoose: (value: T) => void) {
    this.buttons = choices.map(([value, text]) => [value, toggle(text, false, () => onChoose(value))]);
    const buttons = this.buttons.map(([, button]) => button);
    this.element = element("div", { class: "choices", role: "group", "aria-label": label }, ...buttons);
  }

  show(chosen: T): void {
    for (const [value, button] of this.buttons) press(button, value === chosen);
  }
}

/** Create a page section with a heading and a one-sentence introduction. */
export function section(name: string, title: string, lead: Child, ...children: Child[]): HTMLElement {
  const id = newId(name);
  return element(
    "section",
    { class: `part ${name}`, "aria-labelledby": id },
    element("div", { class: "part-head" }, element("h2", { id }, title), element("p", { class: "lead" }, lead)),
    ...children,
  );
}

const MAX_CHARS = 24;

/** Truncate a text to `maxChars` characters. */
export function short(text: string, maxChars: number = MAX_CHARS): string {
  if (text.length <= maxChars) return text;
  return `${Array.from(text.slice(0, 2 * maxChars)).slice(0, maxChars - 1).join("")}…`;
}

/** Return whether a text is written from right to left, according to its first directional character. */
export function isRightToLeft(text: string): boolean {
  const first = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}]|\p{L}/u.exec(text);
  return first !== null && /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}]/u.test(first[0]);
}

/** Resize a canvas to `width` x `height` CSS pixels at the resolution of the screen. */
export function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = Math.max(1, Math.min(3, window.devicePixelRatio || 1));
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d") as CanvasRenderingContext2D;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
