// Color scales for weights (perceptual or single hue) and signed scores (blue and vermilion from Okabe and Ito).
import { CIVIDIS, VIRIDIS } from "./color_tables";

export type Scale = "viridis" | "cividis" | "ink";

/** 256 colors as little-endian canvas pixels: 0xAABBGGRR. */
export type Table = Uint32Array;

const PLUS = [0, 114, 178]; // #0072B2
const MINUS = [213, 94, 0]; // #D55E00
const INK = {
  light: [[250, 249, 246], [143, 190, 218], [0, 114, 178], [8, 40, 80]],
  dark: [[24, 26, 30], [16, 70, 110], [40, 140, 205], [214, 238, 252]],
};

export function tableOf(scale: Scale, dark: boolean): Table {
  if (scale === "ink") return interpolate(INK[dark ? "dark" : "light"]);
  const digits = scale === "viridis" ? VIRIDIS : CIVIDIS;
  return Uint32Array.from({ length: 256 }, (_, index) => {
    const color = parseInt(digits.slice(6 * index, 6 * index + 6), 16);
    return pixel(color >> 16, (color >> 8) & 255, color & 255);
  });
}

/** Return the color table of signed scores: 0 is the most negative, 128 is zero, 255 is the most positive. */
export function signedTable(dark: boolean): Table {
  const middle = dark ? [30, 31, 35] : [248, 247, 244];
  return Uint32Array.from({ length: 256 }, (_, index) => {
    const share = Math.max(-1, (index - 128) / 127);
    const end = share < 0 ? MINUS : PLUS;
    const [red, green, blue] = middle.map((from, i) => Math.round(from + (end[i] - from) * Math.abs(share)));
    return pixel(red, green, blue);
  });
}

export function signedByte(value: number, extent: number): number {
  return 128 + Math.round(127 * Math.max(-1, Math.min(1, value / (extent || 1))));
}

/** Return a table entry as a CSS color. */
export function css(table: Table, byte: number): string {
  const color = table[byte];
  return `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`;
}

/** Return the background color for a signed score between -1 and 1. At both ends, it is that of the legend. */
export function signedBackground(share: number): string {
  const strength = Math.min(1, Math.abs(share));
  return strength < 0.01 ? "transparent" : `rgb(${(share < 0 ? MINUS : PLUS).join(" ")} / ${strength.toFixed(3)})`;
}

const MIN_CONTRAST = 4.5;
const CARD = { light: [255, 255, 255], dark: [27, 29, 33] }; // as in style/base.css and modes.css
const TEXT = { light: [28, 29, 32], dark: [235, 234, 231] };

/** Return black or white for a text on a background of `signedBackground`, or "" if the usual color is readable. */
export function textColorOn(background: string, dark: boolean): string {
  const [red, green, blue, opacity] = (background.match(/[\d.]+/g) ?? []).map(Number);
  if (opacity === undefined) return "";
  const theme = dark ? "dark" : "light";
  const mixed = luminance([red, green, blue].map((value, i) => CARD[theme][i] + (value - CARD[theme][i]) * opacity));
  const usual = luminance(TEXT[theme]);
  if ((Math.max(mixed, usual) + 0.05) / (Math.min(mixed, usual) + 0.05) >= MIN_CONTRAST) return "";
  return (mixed + 0.05) / 0.05 >= MIN_CONTRAST ? "#000" : "#fff";
}

/** Return the relative luminance of an sRGB color, as in WCAG. */
function luminance(color: number[]): number {
  const [red, green, blue] = color.map((value) => (value <= 10.31 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Return the background color for an attention weight. */
export function weightBackground(weight: number): string {
  return signedBackground(Math.sqrt(Math.max(0, weight)));
}

function interpolate(stops: number[][]): Table {
  return Uint32Array.from({ length: 256 }, (_, index) => {
    const position = (index / 255) * (stops.length - 1);
    const stop = Math.min(stops.length - 2, Math.floor(position));
    const mix = stops[stop].map((from, i) => Math.round(from + (stops[stop + 1][i] - from) * (position - stop)));
    return pixel(mix[0], mix[1], mix[2]);
  });
}

function pixel(red: number, green: number, blue: number): number {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
