/** The colour theme: as the system has it, light, or dark; a button goes round. */

const NAMES = { "light dark": "as the system", light: "light", dark: "dark" };
const THEMES = Object.keys(NAMES);
const PLACE = "emberline.theme";

export function wireTheme(button) {
  const apply = (theme) => {
    document.documentElement.style.colorScheme = theme;
    button.title = button.ariaLabel = `Colour theme: ${NAMES[theme]}`;
    localStorage.setItem(PLACE, theme);
  };
  const stored = localStorage.getItem(PLACE);
  apply(THEMES.includes(stored) ? stored : THEMES[0]);
  button.onclick = () => apply(THEMES[(THEMES.indexOf(localStorage.getItem(PLACE)) + 1) % THEMES.length]);
}
