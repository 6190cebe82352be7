// The colours and the font of the style sheet, for what is drawn on a canvas.

export interface Palette {
  ink: string;
  muted: string;
  accent: string;
  family: string;
}

/** Read them once for each colour scheme: reading makes the browser compute all styles. */
export function paletteOf(element: HTMLElement): Palette {
  const style = getComputedStyle(element);
  const [ink, muted, accent] = ["--ink", "--muted", "--accent"].map((name) => style.getPropertyValue(name));
  return { ink, muted, accent, family: style.fontFamily };
}
