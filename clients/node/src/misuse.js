/** The caller's mistake: an option, an address, a file. The commands end with 2 and say it without a stack. */
export class Misuse extends Error {
  name = "Misuse";
}
