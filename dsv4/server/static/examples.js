// What the empty page offers: things the loaded model can do. The embedded model's are from its card.

export const EXAMPLES = {
  "tiny": ["What is the capital of France?", "What is 347 + 585?", "Which continent is Peru in?"],
  "": ["Explain how a hash table works.", "Write a Python function that merges two sorted lists.", "What is the derivative of x² sin x?"]
};
