// Attention maps, decompressed on demand. Byte b encodes the weight (b / 255)².
// Shapes: T tokens, H heads, K weights kept per row.
import type { PageData } from "./data";

/** Source of zlib-compressed layers. */
export interface MapSource {
  compressed(text: number, layer: number): Uint8Array;
}

/** Weight of each byte value. */
export const WEIGHTS = Float32Array.from({ length: 256 }, (_, byte) => (byte / 255) ** 2);

const MAX_CACHED_BYTES = 96e6;

export class Maps {
  private readonly cache = new Map<string, Uint8Array>();
  private readonly pending = new Map<string, Promise<Uint8Array>>();
  private cachedBytes = 0;

  constructor(
    private readonly page: PageData,
    private readonly source: MapSource,
  ) {}

  /** Return the bytes of a layer, (H, T, T), if cached. */
  cached(text: number, layer: number): Uint8Array | undefined {
    return this.cache.get(`${text} ${layer}`);
  }

  /** Return the bytes of a layer, (H, T, T). */
  layer(text: number, layer: number): Promise<Uint8Array> {
    const key = `${text} ${layer}`;
    const cached = this.cache.get(key);
    if (cached) return Promise.resolve(cached);
    let pending = this.pending.get(key);
    if (!pending) {
      pending = this.decompress(text, layer).then((bytes) => {
        this.pending.delete(key);
        this.store(key, bytes);
        return bytes;
      });
      this.pending.set(key, pending);
    }
    return pending;
  }

  private store(key: string, bytes: Uint8Array): void {
    this.cache.set(key, bytes);
    this.cachedBytes += bytes.length;
    for (const [oldest, content] of this.cache) {
      if (this.cachedBytes <= MAX_CACHED_BYTES || oldest === key) break;
      this.cache.delete(oldest);
      this.cachedBytes -= content.length;
    }
  }

  private async decompress(text: number, layer: number): Promise<Uint8Array> {
    const bytes = await inflate(this.source.compressed(text, layer));
    const { tokens, heads } = this.page.texts[text];
    const kept = this.page.kept;
    return kept === null ? bytes : dense(bytes, heads, tokens.length, Math.min(kept, tokens.length));
  }
}

/** Decompress zlib data. */
export async function inflate(compressed: Uint8Array): Promise<Uint8Array> {
  const stream = new Blob([compressed as BlobPart]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Return (H, T, T) maps from the columns and bytes of the K largest weights of each row. Other weights are 0. */
export function dense(bytes: Uint8Array, heads: number, size: number, kept: number): Uint8Array {
  const count = heads * size * kept;
  const columns = new DataView(bytes.buffer, bytes.byteOffset, 2 * count);
  const maps = new Uint8Array(heads * size * size);
  for (let entry = 0; entry < count; entry++) {
    const row = Math.floor(entry / kept);
    maps[row * size + columns.getUint16(2 * entry, true)] = bytes[2 * count + entry];
  }
  return maps;
}

/** Decode base64. */
export function fromBase64(text: string): Uint8Array {
  const native = (Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array }).fromBase64;
  if (native) return native(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
